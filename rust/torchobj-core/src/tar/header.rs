//! A header of 512 bytes: its checksum, numbers, type and name. Knows nothing about other headers.

/// Headers and bodies are padded to a multiple of this.
pub(super) const BLOCK: usize = 512;

/// Larger sizes and offsets are refused: they do not fit file offsets.
const MAX_SIZE: u64 = i64::MAX as u64;

/// What follows a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A file: its body follows.
    Regular,
    /// A link, folder or device: no body follows, whatever its size says.
    Empty,
    /// An unknown type: its body is skipped.
    Unknown,
    /// A file with holes, in the format of GNU.
    Sparse,
    /// The name of the next member, of GNU.
    LongName,
    /// The target of the next member, of GNU.
    LongLink,
    /// pax records of the next member.
    Pax,
    /// pax records of all following members.
    GlobalPax,
}

/// A valid header.
pub(super) struct Header<'a> {
    block: &'a [u8; BLOCK],
    pub(super) kind: Kind,
    pub(super) size: u64,
}

impl<'a> Header<'a> {
    /// Parses a block; `None` for one of zeros, which ends the archive.
    ///
    /// # Errors
    /// It is not a header, for this reason.
    pub(super) fn parse(block: &'a [u8; BLOCK]) -> Result<Option<Self>, String> {
        let field = &block[148..156];
        let total: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        if total == 0 {
            return Ok(None);
        }
        let counted = total - field.iter().map(|byte| u32::from(*byte)).sum::<u32>() + 8 * u32::from(b' ');
        let stored = number(field).map_err(|problem| format!("the checksum is {problem}"))?;
        if stored != u64::from(counted) && i64::try_from(stored) != Ok(signed_checksum(block)) {
            return Err(format!("the checksum is {stored}, must be {counted}"));
        }
        let size = number(&block[124..136]).map_err(|problem| format!("the size is {problem}"))?;
        let kind = match block[156] {
            // A folder of the v7 format.
            0 if terminated(&block[..100]).ends_with(b"/") => Kind::Empty,
            0 | b'0' | b'7' => Kind::Regular,
            b'1'..=b'6' => Kind::Empty,
            b'S' => Kind::Sparse,
            b'L' => Kind::LongName,
            b'K' => Kind::LongLink,
            b'x' | b'X' => Kind::Pax,
            b'g' => Kind::GlobalPax,
            _ => Kind::Unknown,
        };
        Ok(Some(Self { block, kind, size }))
    }

    /// Writes the name to `name`: the prefix of ustar, a slash, and the name.
    pub(super) fn name(&self, name: &mut Vec<u8>) {
        name.clear();
        let prefix = terminated(&self.block[345..500]);
        // tarfile does not look at the magic number either.
        if !prefix.is_empty() && self.kind != Kind::Sparse {
            name.extend_from_slice(prefix);
            name.push(b'/');
        }
        name.extend_from_slice(terminated(&self.block[..100]));
    }
}

/// The checksum of tars that sum signed bytes (Sun, NeXT).
fn signed_checksum(block: &[u8; BLOCK]) -> i64 {
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| i64::from(byte.cast_signed())).sum::<i64>();
    sum(&block[..148]) + sum(&block[156..]) + 8 * i64::from(b' ')
}

/// A field up to its first NUL.
pub(super) fn terminated(field: &[u8]) -> &[u8] {
    field.iter().position(|byte| *byte == 0).map_or(field, |end| &field[..end])
}

/// A number in octal digits, or big-endian after a byte 0x80 (GNU).
fn number(field: &[u8]) -> Result<u64, String> {
    let too_large = || format!("larger than {MAX_SIZE}");
    let mut value: u64 = 0;
    match field[0] {
        0x80 => {
            for byte in &field[1..] {
                value = value.checked_mul(256).ok_or_else(too_large)? | u64::from(*byte);
            }
        }
        0xff => return Err("negative".to_owned()),
        _ => {
            for digit in terminated(field).trim_ascii() {
                match digit {
                    b'0'..=b'7' => value = value.checked_mul(8).ok_or_else(too_large)? | u64::from(digit - b'0'),
                    _ => return Err(format!("not a number: '{}'", field.escape_ascii())),
                }
            }
        }
    }
    if value > MAX_SIZE { Err(too_large()) } else { Ok(value) }
}

/// The size of a body with its padding; `None` if it is too large to be an offset.
pub(super) fn padded(size: u64) -> Option<u64> {
    size.checked_next_multiple_of(BLOCK as u64).filter(|padded| *padded <= MAX_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_binary() {
        assert_eq!(number(b"0000644\0"), Ok(0o644));
        assert_eq!(number(b"  644 \0\0"), Ok(0o644));
        assert_eq!(number(b"77777777"), Ok(0o7777_7777));
        assert_eq!(number(&[0; 8]), Ok(0));
        assert_eq!(number(b"\x80\0\0\0\x01\x02\x03\x04"), Ok(0x0102_0304));
        assert!(number(b"\x80\x01\0\0\0\0\0\0\0\0\0\0").unwrap_err().contains("larger"));
        assert!(number(b"\x80\0\0\0\x80\0\0\0\0\0\0\0").unwrap_err().contains("larger"));
        assert!(number(b"\xff\xff\xff\xff\xff\xff\xff\xff").unwrap_err().contains("negative"));
        assert!(number(b"0000648\0").unwrap_err().contains("not a number"));
        assert!(number(b"-000644\0").unwrap_err().contains("not a number"));
    }

    #[test]
    fn a_padded_size_is_an_offset() {
        assert_eq!((padded(0), padded(1), padded(512)), (Some(0), Some(512), Some(512)));
        assert_eq!((padded(MAX_SIZE), padded(u64::MAX)), (None, None));
    }
}
