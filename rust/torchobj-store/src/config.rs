//! What stores are set up with, by provider. Plain data, no secrets: it is compared, hashed, and pickled above.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How connections are made and kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HttpConfig {
    /// For one TCP connect and its TLS handshake, each.
    pub connect_timeout: Duration,
    /// Connections that were idle for longer are not used again. S3 closes its own after 5 to 20 s.
    pub keep_alive: Duration,
    /// Whether the server's certificate is checked.
    pub verify_tls: bool,
    /// PEM file of the certificates to trust, in place of the system's.
    pub ca_bundle: Option<PathBuf>,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            keep_alive: Duration::from_secs(8),
            verify_tls: true,
            ca_bundle: None,
        }
    }
}

/// How a bucket is named in a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Addressing {
    /// As the SDK's rules say: in the host where that works, in the path of a custom endpoint.
    #[default]
    Auto,
    /// `https://host/bucket/key`
    Path,
    /// `https://bucket.host/key`
    Virtual,
}

/// The checksum that is sent with bodies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// CRC64NVME to AWS, CRC32C to a custom endpoint.
    #[default]
    Auto,
    /// `x-amz-checksum-crc64nvme`
    Crc64Nvme,
    /// `x-amz-checksum-crc32c`
    Crc32C,
    /// None, for stores that refuse them.
    Off,
}

/// Encryption by the server. `Debug` leaves out the name of a key's file, because it may be the key itself.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub enum Encryption {
    /// What the bucket says.
    #[default]
    Bucket,
    /// SSE-S3.
    Aes256,
    /// SSE-KMS, with a key or the account's own.
    Kms {
        /// Key id or ARN.
        key_id: Option<String>,
        /// Two layers (DSSE).
        dual_layer: bool,
    },
    /// SSE-C: the 32 bytes of the key, raw or in Base64, are read from this file.
    CustomerKeyFile(PathBuf),
}

impl fmt::Debug for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bucket => f.write_str("Bucket"),
            Self::Aes256 => f.write_str("Aes256"),
            Self::Kms { key_id, dual_layer } => {
                f.debug_struct("Kms").field("key_id", key_id).field("dual_layer", dual_layer).finish()
            }
            Self::CustomerKeyFile(_) => f.write_str("CustomerKeyFile(..)"),
        }
    }
}

/// How S3, or what speaks like it, is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct S3Config {
    /// Region; found out when `None`.
    pub region: Option<String>,
    /// Endpoint; that of AWS, or the environment's, when `None`.
    pub endpoint_url: Option<String>,
    /// Profile in the shared configuration files.
    pub profile: Option<String>,
    /// Requests are not signed.
    pub anonymous: bool,
    /// How buckets are named.
    pub addressing: Addressing,
    /// The requester pays.
    pub requester_pays: bool,
    /// Encryption of what is written, and of what is read under SSE-C.
    pub encryption: Encryption,
    /// Storage class of what is written.
    pub storage_class: Option<String>,
    /// Checksum of what is written.
    pub checksum: Checksum,
    /// The server keeps objects as files: keys that it would alias are refused.
    pub keys_are_paths: bool,
    /// Everything goes through the SDK.
    pub force_sdk: bool,
    /// Connections.
    pub http: HttpConfig,
}

/// How folders are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileConfig {
    /// A write returns after the file and its folder are flushed to the disk.
    pub sync: bool,
}

impl Default for FileConfig {
    fn default() -> Self {
        Self { sync: true }
    }
}

/// The configuration of one provider: all of it that its clients depend on, and nothing of the other providers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ProviderConfig {
    /// `s3://`
    S3(S3Config),
    /// `file://`
    File(FileConfig),
    /// `memory://`
    Memory,
}

/// The configurations of all providers.
#[derive(Clone, Debug, Default)]
pub struct ProviderConfigs {
    /// For `s3://`.
    pub s3: S3Config,
    /// For `file://`.
    pub file: FileConfig,
}

impl ProviderConfigs {
    /// The configuration for URLs of `scheme`; `None` if no provider has this scheme.
    pub fn for_scheme(&self, scheme: &str) -> Option<ProviderConfig> {
        match scheme {
            "s3" => Some(ProviderConfig::S3(self.s3.clone())),
            "file" => Some(ProviderConfig::File(self.file)),
            "memory" => Some(ProviderConfig::Memory),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_of_one_provider_changes_the_configuration_of_no_other() {
        let before = ProviderConfigs::default();
        let s3 = S3Config { region: Some("eu-west-1".to_owned()), ..S3Config::default() };
        let other_s3 = ProviderConfigs { s3, ..before.clone() };
        let other_file = ProviderConfigs { file: FileConfig { sync: false }, ..before.clone() };
        let changed = |after: &ProviderConfigs| {
            ["s3", "file", "memory"].map(|scheme| before.for_scheme(scheme) != after.for_scheme(scheme))
        };
        assert_eq!(changed(&other_s3), [true, false, false]);
        assert_eq!(changed(&other_file), [false, true, false]);
        assert_eq!(before.for_scheme("ftp"), None);
    }
}
