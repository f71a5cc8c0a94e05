//! Headers that describe the next member: pax records, and long names of GNU.

use super::header::terminated;

/// What extension headers say about the next member. The first header wins: it is applied last by `tarfile`.
#[derive(Debug, Default)]
pub(super) struct Overrides {
    pub(super) path: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    /// The member has holes. Its name, if the records contain it.
    pub(super) sparse: Option<Option<Vec<u8>>>,
}

impl Overrides {
    /// Adds a long name of GNU.
    pub(super) fn long_name(&mut self, data: &[u8]) {
        self.path.get_or_insert_with(|| terminated(data).to_vec());
    }

    /// Adds the records of a pax header.
    ///
    /// # Errors
    /// A record is malformed.
    pub(super) fn pax(&mut self, data: &[u8]) -> Result<(), String> {
        let mut own = Self::default();
        for record in Records(data) {
            let (keyword, value) = record?;
            match keyword {
                b"path" => own.path = Some(trimmed(value).to_vec()),
                b"size" => own.size = Some(size(value)?),
                b"GNU.sparse.name" => own.sparse = Some(Some(value.to_vec())),
                _ if keyword.starts_with(b"GNU.sparse.") => {
                    own.sparse.get_or_insert_default();
                }
                _ => {}
            }
        }
        self.path = self.path.take().or(own.path);
        self.size = self.size.or(own.size);
        self.sparse = self.sparse.take().or(own.sparse);
        Ok(())
    }
}

/// Checks the records of a global pax header.
///
/// # Errors
/// A record is malformed, or describes a single file. A reader that starts after the header could not know it.
pub(super) fn check_global(data: &[u8]) -> Result<(), String> {
    for record in Records(data) {
        let (keyword, _) = record?;
        if keyword == b"path" || keyword == b"size" || keyword.starts_with(b"GNU.sparse.") {
            return Err(format!("a global pax header sets '{}' for all members", keyword.escape_ascii()));
        }
    }
    Ok(())
}

/// `tarfile` removes slashes at the end of a path.
fn trimmed(path: &[u8]) -> &[u8] {
    &path[..path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1)]
}

fn size(value: &[u8]) -> Result<u64, String> {
    let digits = std::str::from_utf8(value).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let size = digits.and_then(|digits| digits.parse::<u64>().ok()).filter(|size| i64::try_from(*size).is_ok());
    let shown = || value[..value.len().min(30)].escape_ascii();
    size.ok_or_else(|| format!("a pax header sets the size to '{}'", shown()))
}

/// Iterates over pax records: `"<length> <keyword>=<value>\n"`, where the length is that of the record.
struct Records<'a>(&'a [u8]);

impl<'a> Iterator for Records<'a> {
    type Item = Result<(&'a [u8], &'a [u8]), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.iter().all(|byte| *byte == 0) {
            return None;
        }
        let record = split(self.0);
        let malformed = || format!("a malformed pax record: '{}'", self.0[..self.0.len().min(30)].escape_ascii());
        let parsed = record.map(|(keyword, value, _)| (keyword, value)).ok_or_else(malformed);
        self.0 = record.map_or(&[], |(_, _, rest)| rest);
        Some(parsed)
    }
}

/// Splits off the first record: keyword, value, rest.
fn split(data: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = data.iter().take(20).position(|byte| *byte == b' ')?;
    let length = std::str::from_utf8(&data[..space]).ok()?.parse::<usize>().ok()?;
    let record = data.get(space + 1..length)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=').filter(|equals| *equals > 0)?;
    Some((&record[..equals], &record[equals + 1..], &data[length..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pax(records: &[u8]) -> Result<Overrides, String> {
        let mut overrides = Overrides::default();
        overrides.pax(records).map(|()| overrides)
    }

    #[test]
    fn records_override_path_and_size() {
        let overrides = pax(b"20 path=a=b \xc3\xa9 c\nd/\n13 size=1234\n\0\0\0").unwrap();
        assert_eq!(overrides.path.unwrap(), b"a=b \xc3\xa9 c\nd");
        assert_eq!(overrides.size, Some(1234));
    }

    #[test]
    fn the_first_header_and_the_last_record_win() {
        let mut overrides = pax(b"9 path=a\n9 path=b\n").unwrap();
        overrides.pax(b"9 path=c\n9 size=5\n").unwrap();
        overrides.long_name(b"long\0");
        assert_eq!((overrides.path.unwrap().as_slice(), overrides.size), (&b"b"[..], Some(5)));
    }

    #[test]
    fn malformed_records_are_refused() {
        for records in [
            &b"path=a\n"[..],
            b"9 path=ab\n",
            b"99 path=a\n",
            b"0 path=a\n",
            b"2 path=a\n",
            b"-9 path=a\n",
            b"8 =abcd\n",
            b"9 pathab\n",
            b"18446744073709551617 path=a\n",
            b"10 size=-1\n",
            b"28 size=9223372036854775808\n",
            b"8 size=\xff\n",
        ] {
            assert!(pax(records).is_err(), "{}", records.escape_ascii());
        }
    }

    #[test]
    fn a_global_header_cannot_describe_a_file() {
        assert_eq!(check_global(b"12 comment=\n"), Ok(()));
        assert!(check_global(b"9 path=a\n").unwrap_err().contains("'path'"));
        assert!(check_global(b"22 GNU.sparse.major=1\n").is_err());
    }
}
