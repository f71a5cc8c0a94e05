//! URLs of objects. The key is the text after the bucket, unchanged: it is neither decoded nor normalised.

use std::fmt;

use crate::error::{Error, ErrorKind, Operation, Result};

/// A scheme, a bucket, and a key that may be empty: `s3://bucket/some key`, `file:///folder/file`.
///
/// A `file` URL has no bucket; its key is the path without the leading slash. `gcs` is an alias of `gs`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectUrl {
    /// `s3`, `gs`, `file` or `memory`.
    pub scheme: String,
    /// The bucket; empty for `file`.
    pub bucket: String,
    /// The key, raw.
    pub key: String,
}

/// An alias of a scheme, and the scheme.
const ALIAS: (&str, &str) = ("gcs", "gs");

/// Replaces an alias at the start of a URL by its scheme.
pub(crate) fn canonical(url: String) -> String {
    match url.strip_prefix(ALIAS.0) {
        Some(rest) if rest.starts_with("://") => [ALIAS.1, rest].concat(),
        _ => url,
    }
}

impl ObjectUrl {
    /// Parses a URL.
    ///
    /// # Errors
    /// `Config` if the URL has no scheme, no bucket although its scheme has buckets, or a user or password.
    pub fn parse(url: &str) -> Result<Self> {
        let refuse = |message: &str| Error::new(ErrorKind::Config, Operation::Connect, url, message);
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| refuse("not a URL: expected scheme://bucket/key, such as s3://bucket/prefix/"))?;
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        match (scheme, bucket) {
            ("file", "") => {}
            ("file", _) => return Err(refuse("a file URL has three slashes: file:///folder")),
            (_, "") => return Err(refuse("the URL names no bucket: expected scheme://bucket/key")),
            // The part before the @ may be a password, which must not be shown.
            _ if bucket.contains('@') => {
                let message = "the URL must not contain a user or a password";
                return Err(Error::new(ErrorKind::Config, Operation::Connect, format!("{scheme}://"), message));
            }
            _ => {}
        }
        let scheme = if scheme == ALIAS.0 { ALIAS.1 } else { scheme };
        Ok(Self { scheme: scheme.to_owned(), bucket: bucket.to_owned(), key: key.to_owned() })
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}/{}", self.scheme, self.bucket, self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_unchanged() {
        for key in ["", "a", "/a", "a//b/", "../x", "a b+%20?#🎉"] {
            let url = format!("s3://bucket/{key}");
            let parsed = ObjectUrl::parse(&url).unwrap();
            assert_eq!((parsed.bucket.as_str(), parsed.key.as_str()), ("bucket", key));
            assert_eq!(parsed.to_string(), url);
        }
        assert_eq!(ObjectUrl::parse("s3://bucket").unwrap().key, "");
    }

    #[test]
    fn a_url_without_scheme_or_bucket_is_refused() {
        for url in ["bucket/key", "/tmp/x", "s3:///key", "s3://", "file://host/x"] {
            assert_eq!(ObjectUrl::parse(url).unwrap_err().kind(), ErrorKind::Config, "{url}");
        }
    }

    #[test]
    fn a_password_is_refused_and_not_shown() {
        let error = ObjectUrl::parse("s3://user:secret@bucket/key").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(!error.to_string().contains("secret"), "{error}");
    }

    #[test]
    fn a_file_url_is_a_path() {
        assert_eq!(ObjectUrl::parse("file:///data/x").unwrap().key, "data/x");
    }
}
