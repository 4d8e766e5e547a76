//! `strftime` for `strftime_now`: what Python prints in the C locale, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A moment of the Gregorian calendar, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    /// Seconds since 1970.
    seconds: i64,
}

impl Date {
    /// The moment of a clock.
    pub fn of(time: SystemTime) -> Date {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_secs()).unwrap_or(0),
            Err(before) => -i64::try_from(before.duration().as_secs()).unwrap_or(0),
        };
        Date { seconds }
    }

    /// A moment given by its parts; days and hours beyond their range count on.
    pub fn new(year: i64, month: u32, day: u32, hour: u32, minute: u32, second: u32) -> Date {
        let days = days_before_year(year) + days_before_month(year, month) + i64::from(day) - 1;
        Date { seconds: days * 86_400 + i64::from(hour) * 3600 + i64::from(minute) * 60 + i64::from(second) }
    }

    /// Seconds since 1970.
    pub fn unix_seconds(&self) -> i64 {
        self.seconds
    }

    /// Python's `strftime`; directives that it does not know stay as they are.
    pub fn format(&self, format: &str) -> String {
        let (year, month, day) = self.day();
        let of_day = self.seconds.rem_euclid(86_400);
        let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
        let weekday = (self.seconds.div_euclid(86_400) + 4).rem_euclid(7) as usize; // 1970-01-01: Thursday
        let of_year = days_before_month(year, month) + i64::from(day);
        let hour12 = (hour + 11) % 12 + 1;
        let month_name = MONTHS[month as usize - 1];
        let mut out = String::new();
        let mut letters = format.chars();
        while let Some(letter) = letters.next() {
            if letter != '%' {
                out.push(letter);
                continue;
            }
            // `%-d`: without the leading zero, as glibc has it.
            let rest = letters.as_str();
            let (bare, directive) = match rest.strip_prefix('-') {
                Some(rest) => (true, rest.chars().next()),
                None => (false, rest.chars().next()),
            };
            let padded = |number: i64, width: usize| match bare {
                true => number.to_string(),
                false => format!("{number:0width$}"),
            };
            let text = match directive {
                Some('Y') => year.to_string(),
                Some('y') => padded(year.rem_euclid(100), 2),
                Some('m') => padded(i64::from(month), 2),
                Some('d') => padded(i64::from(day), 2),
                Some('e') => {
                    if bare {
                        day.to_string()
                    } else {
                        format!("{day:2}")
                    }
                }
                Some('j') => padded(of_year, 3),
                Some('H') => padded(hour, 2),
                Some('I') => padded(hour12, 2),
                Some('M') => padded(minute, 2),
                Some('S') => padded(second, 2),
                Some('f') => "000000".to_string(),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_string(),
                Some('B') => month_name.to_string(),
                Some('b' | 'h') => month_name[..3].to_string(),
                Some('A') => DAYS[weekday].to_string(),
                Some('a') => DAYS[weekday][..3].to_string(),
                Some('w') => weekday.to_string(),
                Some('u') => ((weekday + 6) % 7 + 1).to_string(),
                Some('F') => self.format("%Y-%m-%d"),
                Some('T' | 'X') => self.format("%H:%M:%S"),
                Some('R') => self.format("%H:%M"),
                Some('D' | 'x') => self.format("%m/%d/%y"),
                Some('c') => self.format("%a %b %e %H:%M:%S %Y"),
                Some('s') => self.seconds.to_string(),
                Some('z' | 'Z') => String::new(), // a clock without a zone
                Some('n') => "\n".to_string(),
                Some('t') => "\t".to_string(),
                Some('%') => "%".to_string(),
                _ => {
                    out.push('%');
                    continue;
                }
            };
            out.push_str(&text);
            letters = rest[usize::from(bare) + 1..].chars();
        }
        out
    }

    /// Year, month from 1, day from 1.
    fn day(&self) -> (i64, u32, u32) {
        let days = self.seconds.div_euclid(86_400);
        // A guess that is never too late by more than a year, then corrected.
        let mut year = 1970 + days * 400 / 146_097;
        while days_before_year(year + 1) <= days {
            year += 1;
        }
        while days_before_year(year) > days {
            year -= 1;
        }
        let of_year = days - days_before_year(year);
        let month = (1..=12).rev().find(|&m| days_before_month(year, m) <= of_year).unwrap_or(1);
        (year, month, (of_year - days_before_month(year, month)) as u32 + 1)
    }
}

/// Days from 1970-01-01 to the first day of a year.
fn days_before_year(year: i64) -> i64 {
    let before = year - 1;
    let leaps = |year: i64| year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    (year - 1970) * 365 + leaps(before) - leaps(1969)
}

/// Days from the first day of a year to the first day of a month.
fn days_before_month(year: i64, month: u32) -> i64 {
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    lengths.iter().take(month.saturating_sub(1) as usize).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        // From Python's datetime.
        let cases = [
            (0, "1970-01-01 00:00:00 Thursday 001"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday 060"),
            (1_772_874_303, "2026-03-07 09:05:03 Saturday 066"),
            (4_107_542_399, "2100-02-28 23:59:59 Sunday 059"),
            (4_107_542_400, "2100-03-01 00:00:00 Monday 060"),
            (-1, "1969-12-31 23:59:59 Wednesday 365"),
            (253_402_300_799, "9999-12-31 23:59:59 Friday 365"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(Date { seconds }.format("%Y-%m-%d %H:%M:%S %A %j"), expected);
        }
    }

    #[test]
    fn parts_and_seconds_agree_on_every_day() {
        for days in -200_000..200_000 {
            let date = Date { seconds: days * 86_400 + 3723 };
            let (year, month, day) = date.day();
            assert_eq!(Date::new(year, month, day, 1, 2, 3), date);
        }
    }

    #[test]
    fn directives() {
        let date = Date::new(2026, 3, 7, 9, 5, 3);
        let cases = [
            ("%d %b %Y", "07 Mar 2026"),
            ("%B %d, %Y", "March 07, 2026"),
            ("%-d %B %y, %a %A", "7 March 26, Sat Saturday"),
            ("%I:%M %p|%-I|%e|%w|%u", "09:05 AM|9| 7|6|6"),
            ("%F %T %R %D", "2026-03-07 09:05:03 09:05 03/07/26"),
            ("100%% %q %-q % é", "100% %q %-q % é"),
            ("ends in %", "ends in %"),
        ];
        for (format, expected) in cases {
            assert_eq!(date.format(format), expected, "{format}");
        }
        assert_eq!(Date::new(2026, 1, 1, 0, 0, 0).format("%I %p"), "12 AM");
        assert_eq!(Date::new(2026, 1, 1, 12, 0, 0).format("%I %p"), "12 PM");
    }
}
