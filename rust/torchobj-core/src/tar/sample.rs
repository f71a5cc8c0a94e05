//! Groups members to samples by their names, as the `webdataset` package does.

use std::collections::HashSet;

use super::{TarError, shown};

/// Maximum number of members of a sample.
const MAX_MEMBERS: usize = 1 << 16;

/// Up to this number, comparing all extensions is faster than hashing them.
const FEW_MEMBERS: usize = 16;

/// Names in a sample that are no extensions.
const RESERVED: [&[u8]; 2] = [b"__key__", b"__url__"];

/// A file of a sample.
#[derive(Debug)]
pub struct Member<B> {
    /// What follows the first dot of the file name, in lower case.
    pub extension: Vec<u8>,
    /// Its bytes, or their position.
    pub body: B,
}

/// Consecutive members whose names differ in the extension only.
#[derive(Debug)]
pub struct Sample<B> {
    /// Offset of its first header.
    pub begin: u64,
    /// Offset after its last member.
    pub end: u64,
    /// The common part of the names.
    pub key: Vec<u8>,
    /// Its members, or why it is not usable: an extension occurs twice.
    pub members: Result<Vec<Member<B>>, TarError>,
}

/// Builds the sample whose members arrive.
#[derive(Debug)]
pub(super) struct SampleBuilder<B> {
    current: Option<Sample<B>>,
    /// Extensions of a sample of many members.
    seen: HashSet<Vec<u8>>,
    /// Offset of the header of the member that arrives.
    member: u64,
}

/// Splits a name at the first dot of its file name: the index of the dot. `None` if the member belongs to no sample.
///
/// Equal to the regular expressions of webdataset, `^((?:.*/|)[^.]+)[.]([^/]*)$` and `__[^/]*__($|/)`, also for names such as
/// `folder/.hidden` (key `folder/`).
pub(super) fn split(name: &[u8]) -> Option<usize> {
    if is_meta(name) {
        return None;
    }
    let file = name.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let dot = file + name[file..].iter().position(|byte| *byte == b'.')?;
    // The key ends with `[^.]+`, at least one byte without dots after the start of the name or a slash. `.*` matches no newline.
    let Some(before) = name[..dot].iter().rposition(|byte| *byte == b'.') else {
        return (dot > 0).then_some(dot);
    };
    // The first slash after the dots leaves the most to `[^.]+` and the least to `.*`: no other one fits if it does not.
    let slash = before + 1 + name[before + 1..dot].iter().position(|byte| *byte == b'/')?;
    (slash + 1 < dot && !name[..slash].contains(&b'\n')).then_some(dot)
}

/// Whether the first component of a name is `__<any>__`, which marks metadata.
fn is_meta(name: &[u8]) -> bool {
    if !name.starts_with(b"__") {
        return false;
    }
    let first = match name.iter().position(|byte| *byte == b'/') {
        Some(slash) => &name[..slash],
        None => name.strip_suffix(b"\n").unwrap_or(name),
    };
    first.len() >= 4 && first.ends_with(b"__")
}

/// Lower case as `str.lower` of Python. Bytes that are not UTF-8 are kept.
fn lower(extension: &[u8]) -> Vec<u8> {
    if extension.is_ascii() {
        return extension.to_ascii_lowercase();
    }
    let mut lower = Vec::with_capacity(extension.len());
    for chunk in extension.utf8_chunks() {
        lower.extend_from_slice(chunk.valid().to_lowercase().as_bytes());
        lower.extend_from_slice(chunk.invalid());
    }
    lower
}

impl<B> SampleBuilder<B> {
    pub(super) fn new() -> Self {
        Self { current: None, seen: HashSet::new(), member: 0 }
    }

    /// Begins a member of this key, whose first header is at `begin`. Returns the sample before it if it is of another one.
    pub(super) fn open(&mut self, key: &[u8], begin: u64) -> Option<Sample<B>> {
        self.member = begin;
        if self.current.as_ref().is_some_and(|current| current.key == key) {
            return None;
        }
        self.seen.clear();
        self.current.replace(Sample { begin, end: begin, key: key.to_vec(), members: Ok(Vec::new()) })
    }

    /// Adds the member that was begun last. `end` is the offset after it.
    ///
    /// # Errors
    /// The sample has too many members.
    pub(super) fn add(&mut self, extension: &[u8], body: B, end: u64) -> Result<(), TarError> {
        let current = self.current.as_mut().expect("`open` sets it");
        current.end = end;
        let Ok(members) = &mut current.members else { return Ok(()) };
        let extension = lower(extension);
        let count = members.len();
        if count == MAX_MEMBERS {
            let reason = format!("sample {} has more than {MAX_MEMBERS} members", shown(&current.key));
            return Err(TarError::new(self.member, reason));
        }
        let known = if count < FEW_MEMBERS {
            members.iter().any(|member| member.extension == extension)
        } else {
            if count == FEW_MEMBERS {
                self.seen.extend(members.iter().map(|member| member.extension.clone()));
            }
            !self.seen.insert(extension.clone())
        };
        if known || RESERVED.contains(&extension.as_slice()) {
            let what = if known { "several members" } else { "a member" };
            let (key, extension) = (shown(&current.key), shown(&extension));
            let reason = format!("sample {key} has {what} with the extension {extension}");
            current.members = Err(TarError::new(self.member, reason));
            return Ok(());
        }
        members.push(Member { extension, body });
        Ok(())
    }

    /// Offset and key of the sample whose members arrive.
    pub(super) fn current(&self) -> Option<(u64, &[u8])> {
        self.current.as_ref().map(|sample| (sample.begin, sample.key.as_slice()))
    }

    /// Returns the last sample.
    pub(super) fn finish(&mut self) -> Option<Sample<B>> {
        self.current.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(name: &str) -> Option<(&str, &str)> {
        split(name.as_bytes()).map(|dot| (&name[..dot], &name[dot + 1..]))
    }

    #[test]
    fn names_are_split_at_the_first_dot_of_the_file_name() {
        assert_eq!(parts("a.jpg"), Some(("a", "jpg")));
        assert_eq!(parts("./v1.0/a.seg.png"), Some(("./v1.0/a", "seg.png")));
        assert_eq!(parts("a."), Some(("a", "")));
        assert_eq!(parts("folder/.hidden"), Some(("folder/", "hidden")));
        assert_eq!(parts("/.hidden"), Some(("/", "hidden")));
        assert_eq!(parts("v1.0/b/.hidden.x"), Some(("v1.0/b/", "hidden.x")));
        assert_eq!(parts("a\nb.jpg\n"), Some(("a\nb", "jpg\n")));
        assert_eq!(parts("a\nb/c.jpg"), Some(("a\nb/c", "jpg")));
        for name in ["", "a", "a.b/c", ".hidden", "v1.0/.hidden", "./.hidden", "a.b\nc/d.jpg", "a.b/"] {
            assert_eq!(parts(name), None, "{name:?}");
        }
    }

    /// Tries each start of `[^.]+` of the regular expression.
    fn split_by_trial(name: &[u8]) -> Option<usize> {
        let file = name.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        let dot = file + name[file..].iter().position(|byte| *byte == b'.')?;
        let fits = |start: usize| {
            let (prefix, within) = (&name[..start], &name[start..dot]);
            let prefix_fits = prefix.is_empty() || (prefix.ends_with(b"/") && !prefix.contains(&b'\n'));
            prefix_fits && !within.is_empty() && !within.contains(&b'.')
        };
        (0..dot).any(fits).then_some(dot)
    }

    #[test]
    fn all_short_names_are_split_as_by_the_regular_expression() {
        let mut names = vec![Vec::new()];
        for _ in 0..8 {
            names = names.iter().flat_map(|name| b"a./\n".map(|byte| [name, &[byte][..]].concat())).collect();
            for name in &names {
                assert_eq!(split(name), split_by_trial(name), "'{}'", name.escape_ascii());
            }
        }
    }

    #[test]
    fn a_name_of_many_slashes_after_a_newline_is_split_in_linear_time() {
        let slashes = "/".repeat(900_000);
        let name = format!("\n{slashes}.x");
        assert_eq!(parts(&name), Some((&name[..900_001], "x")));
        assert_eq!(parts(&format!("a.\n{slashes}.x")), None);
    }

    #[test]
    fn metadata_is_skipped() {
        for name in ["__a__", "__a__/b.jpg", "____/b.jpg", "__a__\n"] {
            assert!(is_meta(name.as_bytes()), "{name:?}");
        }
        for name in ["__a__.jpg", "b/__a__", "__a_/b.jpg", "___/b.jpg", "__a__b/c.jpg"] {
            assert!(!is_meta(name.as_bytes()), "{name:?}");
        }
    }

    #[test]
    fn extensions_are_lower_case_as_in_python() {
        assert_eq!(lower(b"JPG"), b"jpg");
        assert_eq!(lower("ÄΣ".as_bytes()), "äς".as_bytes());
        assert_eq!(lower(b"\xffA\xc3\x84"), b"\xffa\xc3\xa4");
    }

    #[test]
    fn an_extension_that_occurs_twice_is_an_error_of_its_sample() {
        let mut builder = SampleBuilder::new();
        for (count, last) in [(3, "2"), (40, "7"), (2, "__url__")] {
            assert_eq!(builder.open(format!("{count}").as_bytes(), 512).is_some(), count != 3);
            for index in 0..count {
                builder.add(index.to_string().as_bytes(), (), 1024).unwrap();
            }
            builder.open(format!("{count}").as_bytes(), 1024);
            builder.add(last.as_bytes(), (), 2048).unwrap();
            let Sample { begin, end, members, .. } = builder.current.as_ref().unwrap();
            let error = members.as_ref().unwrap_err();
            assert_eq!((*begin, *end, error.offset), (512, 2048, 1024));
            assert!(error.reason.contains(last), "{error}");
        }
    }
}
