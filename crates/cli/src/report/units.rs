//! Numbers as people read them. Whatever is not a finite number comes out as a word, never as a
//! broken column.

/// Decimal units with three significant digits: `999 B`, `1.70 MB`, `411 MB`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let (value, unit) = scaled(bytes as f64, UNITS.len() - 1);
    format!("{} {}", three_digits(value), UNITS[unit])
}

/// `812`, `145.6K`, `143.7M`.
pub(crate) fn count(count: u64) -> String {
    const UNITS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];
    if count < 1000 {
        return count.to_string();
    }
    let (mut value, mut unit) = ((count as f64), 0);
    // 999 950 is where one decimal would show 1000.0K.
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1}{}", UNITS[unit])
}

/// `850 µs`, `12.5 ms`, `41.2 s`, `3 min 12 s`, `1 h 04 min`, `2 d 03 h`.
pub(crate) fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "unknown".into();
    }
    let whole = seconds.round() as u64;
    match seconds {
        0.0 => "0 s".into(),
        ..0.999_5e-3 => format!("{:.0} µs", seconds * 1e6),
        ..0.999_5 => format!("{} ms", three_digits(seconds * 1e3)),
        ..59.95 => format!("{seconds:.1} s"),
        ..3_599.5 => format!("{} min {:02} s", whole / 60, whole % 60),
        ..86_399.5 => format!("{} h {:02} min", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {:02} h", whole / 86_400, whole / 3600 % 24),
    }
}

/// A share of one as a percentage: `98.9 %`.
pub(crate) fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.1} %", share * 100.0) } else { "unknown".into() }
}

/// Images per second: `1,234`, with decimals only where they say something.
pub(crate) fn rate(rate: f64) -> String {
    match rate {
        r if !r.is_finite() => "unknown".into(),
        r if r.abs() < 99.95 => format!("{r:.1}"),
        r => grouped(r.round().max(0.0) as u64),
    }
}

/// A loss: four decimals around one, exponents where those would say nothing.
pub(crate) fn loss(loss: f64) -> String {
    match loss {
        l if l.is_nan() => "NaN".into(),
        l if l.is_infinite() => if l > 0.0 { "infinite" } else { "-infinite" }.into(),
        l if l != 0.0 && (l.abs() < 1e-3 || l.abs() >= 1e5) => format!("{l:.2e}"),
        l => format!("{l:.4}"),
    }
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 worker`, `2 workers`.
pub(crate) fn plural(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// Divides by a thousand until three digits show it, but not more often than `most` times.
fn scaled(mut value: f64, most: usize) -> (f64, usize) {
    let mut unit = 0;
    while value >= 999.5 && unit < most {
        value /= 1000.0;
        unit += 1;
    }
    (value, unit)
}

fn three_digits(value: f64) -> String {
    match value.abs() {
        v if v < 9.995 => format!("{value:.2}"),
        v if v < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_three_digits_and_never_a_thousand_of_a_unit() {
        let cases = [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (9_994, "9.99 kB"),
            (9_996, "10.0 kB"),
            (999_499, "999 kB"),
            (999_500, "1.00 MB"),
            (411_041_792, "411 MB"),
            (u64::MAX, "18.4 EB"),
        ];
        for (number, text) in cases {
            assert_eq!(bytes(number), text);
        }
    }

    #[test]
    fn counts_are_short() {
        let cases = [
            (0, "0"),
            (999, "999"),
            (1000, "1.0K"),
            (145_578, "145.6K"),
            (999_949, "999.9K"),
            (999_950, "1.0M"),
            (143_667_240, "143.7M"),
        ];
        for (number, text) in cases {
            assert_eq!(count(number), text);
        }
    }

    #[test]
    fn durations_use_the_unit_people_would() {
        let cases = [
            (0.0, "0 s"),
            (0.000_85, "850 µs"),
            (0.012_5, "12.5 ms"),
            (0.999_6, "1.0 s"),
            (41.24, "41.2 s"),
            (59.96, "1 min 00 s"),
            (192.0, "3 min 12 s"),
            (3_599.6, "1 h 00 min"),
            (3_870.0, "1 h 04 min"),
            (183_600.0, "2 d 03 h"),
            (f64::NAN, "unknown"),
            (f64::INFINITY, "unknown"),
            (-1.0, "unknown"),
        ];
        for (number, text) in cases {
            assert_eq!(duration(number), text);
        }
    }

    #[test]
    fn shares_rates_and_losses() {
        assert_eq!(percent(0.9893), "98.9 %");
        assert_eq!(percent(f64::NAN), "unknown");
        assert_eq!(rate(12.34), "12.3");
        assert_eq!(rate(1_234_567.8), "1,234,568");
        assert_eq!(rate(f64::INFINITY), "unknown");
        assert_eq!(loss(0.041_23), "0.0412");
        assert_eq!(loss(0.000_012), "1.20e-5");
        assert_eq!(loss(0.0), "0.0000");
        assert_eq!(loss(f64::NAN), "NaN");
        assert_eq!(loss(f64::NEG_INFINITY), "-infinite");
        assert_eq!(plural(1, "worker"), "1 worker");
        assert_eq!(plural(60_000, "image"), "60,000 images");
    }
}
