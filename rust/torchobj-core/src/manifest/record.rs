//! Encodes numbers, versions and whole records of a serialized manifest.
//!
//! Numbers are LEB128. A version is a tag and its content; an ETag in the form of S3, `"<32 hex>"` or
//! `"<32 hex>-<parts>"`, takes 17 to 20 bytes instead of a string.

use crate::types::Version;

/// Number of tags of a version.
pub(super) const VERSION_TAGS: u64 = 4;

pub(crate) fn write_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

pub(crate) fn read_number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    // Most numbers are small.
    if let [byte @ 0..=0x7f, rest @ ..] = bytes {
        return Some((u64::from(*byte), rest));
    }
    let mut number = 0;
    for (index, byte) in bytes.iter().enumerate().take(10) {
        number |= u64::from(byte & 0x7f).checked_shl(u32::try_from(7 * index).ok()?)?;
        if byte & 0x80 == 0 {
            return Some((number, &bytes[index + 1..]));
        }
    }
    None
}

pub(crate) fn write_version(out: &mut Vec<u8>, version: Option<&Version>) {
    let version = PackedVersion::of(version);
    out.push(version.tag());
    version.write(out);
}

pub(crate) fn read_version(bytes: &[u8]) -> Option<(Option<Version>, &[u8])> {
    let (tag, bytes) = bytes.split_first()?;
    let (version, rest) = PackedVersion::read(*tag, bytes)?;
    Some((version.unpack(), rest))
}

/// A version in packed form.
#[derive(Clone, Copy)]
pub(super) enum PackedVersion<'a> {
    Unknown,
    /// An ETag of S3, with its number of parts.
    Md5([u8; 16], Option<u64>),
    Text(&'a str),
}

impl<'a> PackedVersion<'a> {
    pub(super) fn of(version: Option<&'a Version>) -> Self {
        let Some(text) = version.map(Version::as_str) else { return Self::Unknown };
        match parse_md5(text) {
            Some((md5, parts)) => Self::Md5(md5, parts),
            None => Self::Text(text),
        }
    }

    pub(super) fn tag(&self) -> u8 {
        match self {
            Self::Unknown => 0,
            Self::Md5(_, None) => 1,
            Self::Md5(_, Some(_)) => 2,
            Self::Text(_) => 3,
        }
    }

    /// Writes everything but the tag.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Unknown => {}
            Self::Md5(md5, parts) => {
                out.extend_from_slice(md5);
                parts.iter().for_each(|parts| write_number(out, *parts));
            }
            Self::Text(text) => {
                write_number(out, text.len() as u64);
                out.extend_from_slice(text.as_bytes());
            }
        }
    }

    /// Reads what [`write`](Self::write) wrote for `tag`. Returns it and the remaining bytes.
    pub(super) fn read(tag: u8, bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        match tag {
            0 => Some((Self::Unknown, bytes)),
            1 => {
                let (md5, rest) = bytes.split_first_chunk()?;
                Some((Self::Md5(*md5, None), rest))
            }
            2 => {
                let (md5, rest) = bytes.split_first_chunk()?;
                let (parts, rest) = read_number(rest)?;
                Some((Self::Md5(*md5, Some(parts)), rest))
            }
            3 => {
                let (length, bytes) = read_number(bytes)?;
                let (text, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
                Some((Self::Text(std::str::from_utf8(text).ok()?), rest))
            }
            _ => None,
        }
    }

    pub(super) fn unpack(&self) -> Option<Version> {
        match self {
            Self::Unknown => None,
            Self::Md5(md5, parts) => Some(Version::new(format_md5(md5, *parts))),
            Self::Text(text) => Some(Version::new(*text)),
        }
    }
}

/// Parses an ETag in the form of S3. `None` if `format_md5` would not return the same text.
fn parse_md5(text: &str) -> Option<([u8; 16], Option<u64>)> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?.as_bytes();
    let (hex, rest) = inner.split_first_chunk::<32>()?;
    let mut md5 = [0; 16];
    for (byte, digits) in md5.iter_mut().zip(hex.chunks_exact(2)) {
        *byte = hex_value(digits[0])? << 4 | hex_value(digits[1])?;
    }
    if rest.is_empty() {
        return Some((md5, None));
    }
    let parts = std::str::from_utf8(rest.strip_prefix(b"-")?).ok()?.parse().ok()?;
    (format_md5(&md5, Some(parts)) == text).then_some((md5, Some(parts)))
}

fn hex_value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

fn format_md5(md5: &[u8; 16], parts: Option<u64>) -> String {
    let mut text = String::with_capacity(40);
    text.push('"');
    for byte in md5 {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
    }
    if let Some(parts) = parts {
        text.push('-');
        text.push_str(&parts.to_string());
    }
    text.push('"');
    text
}
