//! The plan as a table in columns that line up, whatever script the names are in.

use super::{Paint, printable};
use crate::report::{LayerReport, units};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// A header, a row for each layer, and a total. A reason takes the room that is left in its row, and
/// two lines at most.
pub(crate) fn plan(layers: &[LayerReport], width: usize, paint: Paint) -> Vec<String> {
    folded(layers, layers.len(), width, paint)
}

/// The same table, if a row may stand for several of `count` layers.
pub(crate) fn folded(
    layers: &[LayerReport],
    count: usize,
    width: usize,
    paint: Paint,
) -> Vec<String> {
    let total = LayerTotal::of(layers, count);
    let cells: Vec<[String; 5]> = layers.iter().map(|layer| row(layer, width / 4)).collect();
    let widths: [usize; 5] = std::array::from_fn(|column| {
        let rows = cells.iter().chain([&total.cells]);
        let widest = rows.map(|row| row[column].width()).max().unwrap_or(0);
        widest.max(HEADER[column].width())
    });
    let taken: usize = widths.iter().map(|width| width + GAP.len()).sum();
    let room = width.min(WIDEST).saturating_sub(taken);
    if room < SHORTEST_WHY {
        return narrow(layers, &cells, &total, widths, width, paint);
    }

    let mut lines = vec![
        paint.bold(&format!("{}why", aligned(&HEADER.map(String::from), widths))),
        paint.dim(&"─".repeat(taken + longest_why(layers).clamp(3, room))),
    ];
    let indent = " ".repeat(taken);
    let mut said = None;
    for (layer, cells) in layers.iter().zip(&cells) {
        let why = why(layer, &mut said);
        let mut why = wrapped(&why, room, WHY_LINES).into_iter();
        let first = why.next().unwrap_or_default();
        let line = format!("{}{}", aligned(cells, widths), paint.dim(&first));
        lines.push(line.trim_end().into());
        lines.extend(why.map(|more| format!("{indent}{}", paint.dim(&more))));
    }
    lines.push(paint.bold(aligned(&total.cells, widths).trim_end()));
    lines
}

/// The table without room for reasons beside the rows: each reason is on lines of its own, below the
/// rows it is the reason of.
fn narrow(
    layers: &[LayerReport],
    cells: &[[String; 5]],
    total: &LayerTotal,
    widths: [usize; 5],
    width: usize,
    paint: Paint,
) -> Vec<String> {
    let all = widths.iter().map(|width| width + GAP.len()).sum::<usize>() - GAP.len();
    let mut lines = vec![
        paint.bold(aligned(&HEADER.map(String::from), widths).trim_end()),
        paint.dim(&"─".repeat(all)),
    ];
    for (i, (layer, cells)) in layers.iter().zip(cells).enumerate() {
        lines.push(aligned(cells, widths).trim_end().into());
        let is_last = layers.get(i + 1).is_none_or(|next| next.reason != layer.reason);
        if is_last {
            let room = width.max(SHORTEST_WHY) - GAP.len();
            let why = wrapped(&printable(&layer.reason), room, WHY_LINES);
            lines.extend(why.into_iter().map(|line| format!("{GAP}{}", paint.dim(&line))));
        }
    }
    lines.push(paint.bold(aligned(&total.cells, widths).trim_end()));
    lines
}

/// The reason of a row, said once where rows one after the other have the same.
fn why<'a>(layer: &'a LayerReport, said: &mut Option<&'a str>) -> String {
    match said.replace(&layer.reason) {
        Some(before) if before == layer.reason && before.width() > AS_ABOVE.width() => {
            AS_ABOVE.into()
        }
        _ => printable(&layer.reason),
    }
}

struct LayerTotal {
    cells: [String; 5],
}

impl LayerTotal {
    fn of(layers: &[LayerReport], count: usize) -> Self {
        let parameters = layers.iter().map(|layer| layer.parameters as u64);
        let bytes = layers.iter().map(|layer| layer.bytes_sent_per_step);
        let cells = [
            units::plural(count as u64, "layer"),
            String::new(),
            units::count(parameters.fold(0, u64::saturating_add)),
            String::new(),
            units::bytes(bytes.fold(0, u64::saturating_add)),
        ];
        Self { cells }
    }
}

/// The layer's own cells, its name in about `name_width` columns.
fn row(layer: &LayerReport, name_width: usize) -> [String; 5] {
    [
        cut(&printable(&layer.name), name_width.clamp(SHORTEST_NAME, LONGEST_NAME)),
        cut(&printable(&layer.kind), LONGEST_KIND),
        units::count(layer.parameters as u64),
        cut(&printable(&layer.scheme), LONGEST_KIND),
        units::bytes(layer.bytes_sent_per_step),
    ]
}

fn longest_why(layers: &[LayerReport]) -> usize {
    layers.iter().map(|layer| printable(&layer.reason).width()).max().unwrap_or(0)
}

/// Text to the left, numbers to the right, a gap after each.
fn aligned(cells: &[String; 5], widths: [usize; 5]) -> String {
    let mut line = String::new();
    for (column, (cell, width)) in cells.iter().zip(widths).enumerate() {
        let padding = " ".repeat(width.saturating_sub(cell.width()));
        let parts = if NUMERIC[column] { [&padding, cell] } else { [cell, &padding] };
        line.extend(parts.map(String::as_str));
        line.push_str(GAP);
    }
    line
}

/// At most `width` columns of `text`; an ellipsis says that there was more.
fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.into();
    }
    let mut kept = String::new();
    let mut columns = 0;
    for c in text.chars() {
        columns += c.width().unwrap_or(0);
        if columns + 1 > width {
            break;
        }
        kept.push(c);
    }
    kept.truncate(kept.trim_end().len());
    kept + "…"
}

/// Breaks `text` between words into at most `most` lines. A word longer than a line is cut.
fn wrapped(text: &str, width: usize, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let full = lines.len() == most;
        match lines.last_mut() {
            Some(line) if line.width() + 1 + word.width() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            Some(line) if full => {
                *line = cut(&format!("{line}…"), width);
                return lines;
            }
            _ => lines.push(cut(word, width)),
        }
    }
    lines
}

const HEADER: [&str; 5] = ["layer", "kind", "size", "scheme", "bytes/step"];
const NUMERIC: [bool; 5] = [false, false, true, false, true];
const GAP: &str = "  ";
const SHORTEST_NAME: usize = 12;
const LONGEST_NAME: usize = 28;
const LONGEST_KIND: usize = 18;
const WHY_LINES: usize = 2;
/// A reason in less is a column of single words.
const SHORTEST_WHY: usize = 20;
const AS_ABOVE: &str = "as above";
/// Longer lines are hard to follow.
const WIDEST: usize = 160;

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Paint = Paint { on: false };

    fn layer(name: &str, reason: &str) -> LayerReport {
        LayerReport {
            name: name.into(),
            kind: "conv".into(),
            parameters: 145_578,
            scheme: "ps".into(),
            reason: reason.into(),
            bytes_sent_per_step: 1_700_000,
        }
    }

    #[test]
    fn columns_line_up_in_any_script() {
        let layers = [
            layer("conv1", "small"),
            layer("畳み込み層", "small"),
            layer("e\u{301}t\u{e9}", "small"),
        ];
        let table = plan(&layers, 100, PLAIN);
        let column = |line: &str, word: &str| line[..line.find(word).unwrap()].width();
        for (word, lines) in [("why", &table[..1]), ("small", &table[2..5])] {
            for line in lines {
                assert_eq!(column(line, word), 46, "{line}");
            }
        }
        for line in &table[2..5] {
            assert_eq!(column(line, "1.70 MB"), column(&table[5], "5.10 MB"));
        }
        assert!(table[5].starts_with("3 layers"));
        assert!(table[5].contains("436.7K"));
    }

    #[test]
    fn rows_fit_the_width() {
        let long = "sufficient factors cost fewer bytes than the parameter server ".repeat(5);
        let layers = [layer(&"features.".repeat(9), &long), layer("fc", &"x".repeat(300))];
        for width in [80, 100, 140] {
            let table = plan(&layers, width, PLAIN);
            for line in &table {
                assert!(line.width() <= width, "{} of {width}: {line}", line.width());
            }
            assert_eq!(table.len(), 2 + 2 + 1 + 1, "two lines, one line, and the frame");
            assert!(table[3].ends_with('…') && table[4].ends_with('…'));
        }
    }

    #[test]
    fn narrow_terminals_have_reasons_below_the_rows() {
        let why = "its gradient has no factors";
        let layers = [layer("conv1", why), layer("conv2", why), layer("fc", "factors are fewer")];
        for width in [48, 56, 60] {
            let table = plan(&layers, width, PLAIN);
            for line in &table {
                assert!(line.width() <= width, "{} of {width}: {line}", line.width());
            }
            let text = table.join("\n");
            assert_eq!(text.matches(why).count(), 1, "{text}");
            assert!(text.contains("factors are fewer"), "{text}");
        }
    }

    #[test]
    fn a_reason_of_several_rows_is_said_once() {
        let why = "its gradient has no factors";
        let layers: Vec<_> = (0..16).map(|i| layer(&format!("conv{i}"), why)).collect();
        let text = plan(&layers, 100, PLAIN).join("\n");
        assert_eq!((text.matches(why).count(), text.matches(AS_ABOVE).count()), (1, 15), "{text}");
    }

    #[test]
    fn names_cannot_command_the_terminal() {
        let table = plan(&[layer("a\x1b[2Jb", "c\r\nd")], 100, PLAIN).join("\n");
        assert!(!table.contains('\x1b') && !table.contains('\r'));
    }

    #[test]
    fn text_is_wrapped_between_words() {
        assert_eq!(wrapped("one two three", 7, 2), ["one two", "three"]);
        assert_eq!(wrapped("one two three four", 7, 2), ["one two", "three…"]);
        assert_eq!(wrapped("one two three for", 9, 2), ["one two", "three for"]);
        assert_eq!(wrapped("", 9, 2), [""; 0]);
        assert_eq!(cut("畳み込み", 5), "畳み…");
    }
}
