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

/// Replaces an alias at the start of a URL by its scheme, and the slashes in the ARN of a bucket.
pub(crate) fn canonical(url: String) -> String {
    if let Some(rest) = url.strip_prefix("s3://").and_then(with_colons) {
        return ["s3://", &rest].concat();
    }
    match url.strip_prefix(ALIAS.0) {
        Some(rest) if rest.starts_with("://") => [ALIAS.1, rest].concat(),
        _ => url,
    }
}

/// Replaces the slashes in the ARN of an access point, with which `rest` begins, by colons, which mean the same.
fn with_colons(rest: &str) -> Option<String> {
    let mut fields = rest.splitn(6, ':');
    let (arn, _partition, service, _region, _account, resource) =
        (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    if arn != "arn" || !service.starts_with("s3") || rest[..rest.len() - resource.len()].contains('/') {
        return None;
    }
    let mut parts = resource.split([':', '/']);
    let first = parts.next()?;
    let mut length = first.len() + 1 + parts.next()?.len();
    if first == "outpost" {
        length += 1 + parts.next().filter(|kind| *kind == "accesspoint")?.len() + 1 + parts.next()?.len();
    } else if first != "accesspoint" {
        return None;
    }
    let (name, key) = resource.split_at(length);
    let start = &rest[..rest.len() - resource.len()];
    (name.contains('/') && (key.is_empty() || key.starts_with('/')))
        .then(|| [start, &name.replace('/', ":"), key].concat())
}

/// `text` as one word of a shell, as `shlex.quote` of Python.
pub(crate) fn shell_quoted(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"@%+=:,./-_".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\"'\"'"))
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
        let arn = if scheme == "s3" { with_colons(rest) } else { None };
        let rest = arn.as_deref().unwrap_or(rest);
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
    fn a_url_is_quoted_for_a_shell_unless_it_is_plain() {
        assert_eq!(shell_quoted("s3://b/a-b_c.d=1"), "s3://b/a-b_c.d=1");
        assert_eq!(shell_quoted("s3://b/$(x) 'y'"), r#"'s3://b/$(x) '"'"'y'"'"''"#);
    }

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
    fn slashes_in_the_arn_of_a_bucket_are_colons() {
        let point = "arn:aws:s3:eu-west-1:123456789012:accesspoint";
        let region = "arn:aws:s3::123456789012:accesspoint";
        let outpost = "arn:aws:s3-outposts:us-west-2:123456789012:outpost";
        for (url, bucket, key) in [
            (format!("{point}/mine/a/b:c"), format!("{point}:mine"), "a/b:c"),
            (format!("{point}:mine/a/b:c"), format!("{point}:mine"), "a/b:c"),
            (format!("{point}/mine"), format!("{point}:mine"), ""),
            (format!("{region}/mfzwi23gnjvgw.mrap/k"), format!("{region}:mfzwi23gnjvgw.mrap"), "k"),
            (format!("{outpost}/op-1/accesspoint/p/k/l"), format!("{outpost}:op-1:accesspoint:p"), "k/l"),
            (format!("{outpost}:op-1:accesspoint:p/k"), format!("{outpost}:op-1:accesspoint:p"), "k"),
            ("bucket/accesspoint/name".to_owned(), "bucket".to_owned(), "accesspoint/name"),
        ] {
            let parsed = ObjectUrl::parse(&format!("s3://{url}")).unwrap();
            assert_eq!((parsed.bucket.as_str(), parsed.key.as_str()), (bucket.as_str(), key), "{url}");
            assert_eq!(
                canonical(format!("s3://{url}")).trim_end_matches('/'),
                parsed.to_string().trim_end_matches('/')
            );
        }
    }

    #[test]
    fn a_file_url_is_a_path() {
        assert_eq!(ObjectUrl::parse("file:///data/x").unwrap().key, "data/x");
    }
}
