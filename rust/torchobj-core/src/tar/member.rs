//! The headers of one member, from bytes as they arrive: extension headers, then its own.

use super::extension::{Overrides, check_global};
use super::header::{BLOCK, Header, Kind, padded};
use super::{TarError, shown};

/// Maximum size of all extension headers of a member. (Linux limits paths to 4 KiB.)
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// Maximum number of extension headers of a member.
const MAX_EXTENSIONS: u32 = 64;

/// Maximum size of a name. Names become keys of samples, so those of a batch are in memory at a time.
const MAX_NAME_BYTES: usize = 64 << 10;

/// What the headers describe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parsed {
    Member(ParsedMember),
    /// The block of zeros after the last member.
    End,
}

/// A member. Its name is in [`Headers::name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ParsedMember {
    /// Offset of its first header.
    pub(super) begin: u64,
    /// Size of its body; 0 if none follows.
    pub(super) size: u64,
    /// Size of its body with the padding.
    pub(super) padded: u64,
    /// Whether it is a file.
    pub(super) regular: bool,
}

/// Parses headers.
#[derive(Debug)]
pub(super) struct Headers {
    /// Offset of the next byte to parse.
    offset: u64,
    /// Offset of the first header of the member.
    begin: u64,
    /// Start of a header that has not arrived completely.
    block: Vec<u8>,
    extension: Option<Extension>,
    overrides: Overrides,
    /// Number of extension headers before the member's own, and their size.
    extensions: u32,
    extension_bytes: u64,
    name: Vec<u8>,
    /// Whether a header was valid. Otherwise these bytes are not a tar.
    valid: bool,
}

/// The body of an extension header.
#[derive(Debug)]
struct Extension {
    kind: Kind,
    size: usize,
    /// Its bytes with the padding, once they have arrived.
    padded: usize,
    data: Vec<u8>,
}

impl Headers {
    /// Parses from this offset of a shard on.
    pub(super) fn new(offset: u64) -> Self {
        Self {
            offset,
            begin: offset,
            block: Vec::new(),
            extension: None,
            overrides: Overrides::default(),
            extensions: 0,
            extension_bytes: 0,
            name: Vec::new(),
            valid: offset > 0,
        }
    }

    /// The name of the last member.
    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Offset of the next byte to parse.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Continues after the body of a member. The caller keeps the sum within an `i64`.
    pub(super) fn skip(&mut self, bytes: u64) {
        self.offset += bytes;
        self.begin = self.offset;
    }

    /// Parses the start of `bytes`. Returns the number of bytes of headers, and what they describe once they are complete.
    ///
    /// # Errors
    /// The headers are damaged, or of a sparse member.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(usize, Option<Parsed>), TarError> {
        let mut rest = bytes;
        loop {
            if let Some(extension) = &mut self.extension {
                let count = rest.len().min(extension.padded - extension.data.len());
                extension.data.extend_from_slice(&rest[..count]);
                self.offset += count as u64;
                rest = &rest[count..];
                if extension.data.len() < extension.padded {
                    return Ok((bytes.len(), None));
                }
                let Extension { kind, size, data, .. } = self.extension.take().expect("it was just filled");
                self.apply(kind, &data[..size])?;
            }
            let count = rest.len().min(BLOCK - self.block.len());
            let whole: Option<[u8; BLOCK]>;
            let block: Option<&[u8; BLOCK]> = if self.block.is_empty() {
                rest.first_chunk()
            } else {
                self.block.extend_from_slice(&rest[..count]);
                whole = self.block.as_slice().try_into().ok();
                whole.as_ref()
            };
            let Some(block) = block else {
                if self.block.is_empty() {
                    self.block.extend_from_slice(rest);
                }
                self.offset += count as u64;
                return Ok((bytes.len(), None));
            };
            let start = self.offset + count as u64 - BLOCK as u64;
            let parsed = self.block(block, start)?;
            self.offset += count as u64;
            self.block.clear();
            rest = &rest[count..];
            if parsed.is_some() {
                return Ok((bytes.len() - rest.len(), parsed));
            }
        }
    }

    /// Checks that the shard may end here: between members.
    ///
    /// # Errors
    /// It ends within a header, or contains none.
    pub(super) fn finish(&self) -> Result<(), TarError> {
        let Self { offset, begin, .. } = *self;
        if !self.valid && offset == 0 {
            return Err(TarError::new(0, "not a tar: it is empty"));
        }
        if let Some(reason) = compression(&self.block).filter(|_| !self.valid) {
            return Err(TarError::new(begin, format!("not a tar: {reason}")));
        }
        if offset > begin {
            let header = offset - begin;
            return Err(TarError::new(
                begin,
                format!("the shard ends in the middle: after {header} bytes of a header"),
            ));
        }
        Ok(())
    }

    /// Parses a header of this offset.
    fn block(&mut self, block: &[u8; BLOCK], start: u64) -> Result<Option<Parsed>, TarError> {
        let header = match Header::parse(block) {
            Ok(Some(header)) => header,
            Ok(None) if self.extensions > 0 => {
                return Err(TarError::new(start, "the archive ends after an extension header, without its member"));
            }
            Ok(None) => return Ok(Some(Parsed::End)),
            Err(reason) if self.valid => return Err(TarError::new(start, format!("damaged header: {reason}"))),
            Err(reason) => {
                let reason = compression(block).map_or(reason, str::to_owned);
                return Err(TarError::new(start, format!("not a tar: {reason}")));
            }
        };
        self.valid = true;
        match header.kind {
            Kind::LongName | Kind::LongLink | Kind::Pax | Kind::GlobalPax => {
                self.begin_extension(header.kind, header.size, start)?;
                return Ok(None);
            }
            Kind::Regular | Kind::Empty | Kind::Unknown | Kind::Sparse => {}
        }
        let overrides = std::mem::take(&mut self.overrides);
        match overrides.path {
            Some(path) => self.name = path,
            None => header.name(&mut self.name),
        }
        if self.name.len() > MAX_NAME_BYTES {
            let (name, bytes) = (shown(&self.name), self.name.len());
            let reason = format!("the name {name} has {bytes} bytes; the limit is {MAX_NAME_BYTES}");
            return Err(TarError::new(self.begin, reason));
        }
        if header.kind == Kind::Sparse || overrides.sparse.is_some() {
            let name = overrides.sparse.flatten();
            let name = shown(name.as_deref().unwrap_or(&self.name));
            let advice = "write the shard without --sparse";
            return Err(TarError::new(
                self.begin,
                format!("{name} is a sparse member, which is not supported; {advice}"),
            ));
        }
        let size = if header.kind == Kind::Empty { 0 } else { overrides.size.unwrap_or(header.size) };
        let end = start + BLOCK as u64;
        let padded = padded(size).filter(|padded| i64::try_from(end.saturating_add(*padded)).is_ok());
        let padded = padded.ok_or_else(|| {
            TarError::new(start, format!("damaged header: a size of {size} bytes of {}", shown(&self.name)))
        })?;
        let begin = std::mem::replace(&mut self.begin, end);
        (self.extensions, self.extension_bytes) = (0, 0);
        Ok(Some(Parsed::Member(ParsedMember { begin, size, padded, regular: header.kind == Kind::Regular })))
    }

    fn begin_extension(&mut self, kind: Kind, size: u64, start: u64) -> Result<(), TarError> {
        self.extensions += 1;
        self.extension_bytes = self.extension_bytes.saturating_add(size);
        if self.extension_bytes > MAX_EXTENSION_BYTES || self.extensions > MAX_EXTENSIONS {
            let Self { extensions, extension_bytes, .. } = self;
            return Err(TarError::new(
                start,
                format!(
                    "{extensions} extension headers of {extension_bytes} bytes for one member; the limits are \
                     {MAX_EXTENSIONS} and {MAX_EXTENSION_BYTES}"
                ),
            ));
        }
        let size = usize::try_from(size).expect("at most MAX_EXTENSION_BYTES: checked above");
        let padded = size.next_multiple_of(BLOCK);
        self.extension = Some(Extension { kind, size, padded, data: Vec::new() });
        Ok(())
    }

    fn apply(&mut self, kind: Kind, data: &[u8]) -> Result<(), TarError> {
        let applied = match kind {
            Kind::LongName => {
                self.overrides.long_name(data);
                Ok(())
            }
            Kind::Pax => self.overrides.pax(data),
            Kind::GlobalPax => check_global(data),
            _ => Ok(()),
        };
        applied.map_err(|reason| TarError::new(self.begin, format!("damaged header: {reason}")))
    }
}

/// What a shard is instead of a tar, by its first bytes: a compressed one, and what to do.
fn compression(start: &[u8]) -> Option<&'static str> {
    match start {
        [0x1f, 0x8b, ..] => Some("it is compressed with gzip; name it .tar.gz"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("it is compressed with zstd; name it .tar.zst"),
        [b'B', b'Z', b'h', b'1'..=b'9', 0x31 | 0x17, ..] => {
            Some("it is compressed with bzip2, which is not supported; recompress it with gzip or zstd")
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            Some("it is compressed with xz, which is not supported; recompress it with gzip or zstd")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, gzip, pax, samples, walked, zstd};
    use super::*;

    #[test]
    fn a_name_longer_than_the_limit_is_an_error() {
        let first = entry(b"a.x", b'0', b"1");
        for kind in [b'0', b'5'] {
            for (bytes, fits) in [(MAX_NAME_BYTES, true), (MAX_NAME_BYTES + 1, false)] {
                let name = [vec![b'n'; bytes - 2], b".x".to_vec()].concat();
                for long in [pax(&[("path", &name)]), entry(b"././@LongLink", b'L', &[&name[..], b"\0"].concat())] {
                    let shard = [first.clone(), long, entry(b"b", kind, b"")].concat();
                    let (found, result) = samples(&shard, &[], None, 0);
                    assert_eq!(walked(&shard).1, result);
                    if fits {
                        assert_eq!(result, Ok(()));
                        continue;
                    }
                    let error = result.unwrap_err();
                    assert_eq!((error.offset, found.len()), (1024, 0));
                    assert!(error.reason.ends_with("has 65537 bytes; the limit is 65536"), "{error}");
                }
            }
        }
    }

    #[test]
    fn a_compressed_shard_with_the_name_of_a_plain_one_is_named_as_such() {
        let tar = entry(b"a.x", b'0', &[1; 100]);
        for (start, reason) in [
            (gzip(&tar), "with gzip; name it .tar.gz"),
            (zstd(&tar), "with zstd; name it .tar.zst"),
            (b"BZh91AY&SY".to_vec(), "with bzip2, which is not supported; recompress it with gzip or zstd"),
            (b"\xfd7zXZ\0\0\x04".to_vec(), "with xz, which is not supported; recompress it with gzip or zstd"),
        ] {
            for length in [start.len(), 2000] {
                let mut shard = start.clone();
                shard.resize(length, 7);
                let expected = TarError::new(0, format!("not a tar: it is compressed {reason}"));
                assert_eq!(samples(&shard, &[3], None, 0).1, Err(expected.clone()));
                assert_eq!(walked(&shard).1, Err(expected));
            }
        }
    }
}
