//! Short tables: columns that line up, whatever script they are in.

use unicode_width::UnicodeWidthStr;

/// Columns that line up; `numeric` ones to the right.
pub(crate) fn table<const N: usize>(
    header: [&str; N],
    numeric: [bool; N],
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let rows: Vec<_> = std::iter::once(header.map(String::from)).chain(rows).collect();
    let widths: [usize; N] =
        std::array::from_fn(|i| rows.iter().map(|row| row[i].width()).max().unwrap_or(0));
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (i, cell) in row.iter().enumerate() {
            let padding = " ".repeat(widths[i] - cell.width());
            let parts = if numeric[i] { [&padding, cell] } else { [cell, &padding] };
            line.extend(parts.map(String::as_str));
            line.push_str("  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
