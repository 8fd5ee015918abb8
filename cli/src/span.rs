//! Durations in arguments: `30s`, `500ms`, `1.5m`, `2h`; a number alone is seconds.

use std::time::Duration;

pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("{text:?} is not a duration: a number, and ms, s, m or h; without a unit, seconds");
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number: f64 = digits.parse().ok().filter(|_| is_number).ok_or_else(wrong)?;
    // To milliseconds: 0.1 s is 100 ms, not 100.000001.
    let millis = (number * unit * 1000.0).round();
    Duration::try_from_secs_f64(millis / 1000.0).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, millis) in
            [("30s", 30_000), ("500ms", 500), ("1.5m", 90_000), ("2h", 7_200_000), ("0.1", 100), ("0", 0)]
        {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "-1", "+1s", "1 s", "1d", "1e3", "inf", "NaN", "1.2.3", "9".repeat(40).as_str()]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
