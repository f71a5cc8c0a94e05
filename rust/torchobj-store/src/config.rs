//! Configuration of each provider. Plain data without secrets: it can be compared and hashed, so it can be the key of a
//! client.

use std::path::PathBuf;
use std::time::Duration;

use torchobj_core::file_store::FileConfig;

use crate::credentials::CredentialProvider;

/// Settings of connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HttpConfig {
    /// Time limit of a TCP connect, and of a TLS handshake.
    pub connect_timeout: Duration,
    /// A connection that was idle for longer is closed. S3 closes idle connections after 5 to 20 s.
    pub keep_alive: Duration,
    /// Whether the server's certificate is verified.
    pub verify_tls: bool,
    /// PEM file of the trusted CA certificates, instead of those of the system.
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

/// Whether requests name the bucket in the host or in the path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Addressing {
    /// In the host if the endpoint rules of the SDK allow it; in the path for a custom endpoint.
    #[default]
    Auto,
    /// `https://host/bucket/key`
    Path,
    /// `https://bucket.host/key`
    Virtual,
}

/// The checksum sent with request bodies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// CRC64NVME for AWS, CRC32C for a custom endpoint.
    #[default]
    Auto,
    /// `x-amz-checksum-crc64nvme`
    Crc64Nvme,
    /// `x-amz-checksum-crc32c`
    Crc32C,
    /// None, for stores that refuse checksum headers.
    Off,
}

/// Server-side encryption. Without `Debug`, because a user may pass the key itself by mistake as the path of a key file.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub enum Encryption {
    /// The default encryption of the bucket.
    #[default]
    Bucket,
    /// SSE-S3.
    Aes256,
    /// SSE-KMS, with this key or the default key of the account.
    Kms {
        /// Key id or ARN.
        key_id: Option<String>,
        /// Dual-layer encryption (DSSE-KMS).
        dual_layer: bool,
    },
    /// SSE-C: this file contains the key of 32 bytes, raw or in Base64.
    CustomerKeyFile(PathBuf),
}

/// Configuration of S3 and compatible stores.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct S3Config {
    /// Region; `None`: detected.
    pub region: Option<String>,
    /// Endpoint; `None`: that of the environment, otherwise that of AWS.
    pub endpoint_url: Option<String>,
    /// Profile in the shared configuration files.
    pub profile: Option<String>,
    /// Source of credentials, instead of the environment and the profile.
    pub credential_provider: Option<CredentialProvider>,
    /// Whether requests are sent unsigned.
    pub anonymous: bool,
    /// Whether requests name the bucket in the host or in the path.
    pub addressing: Addressing,
    /// Whether the requester pays for requests and transfer.
    pub requester_pays: bool,
    /// Encryption of written objects; with SSE-C also of objects that are read.
    pub encryption: Encryption,
    /// Storage class of written objects.
    pub storage_class: Option<String>,
    /// Checksum sent with written objects.
    pub checksum: Checksum,
    /// Whether the server compares versions before it writes; `None`: unless the endpoint is that of Google Cloud Storage.
    pub conditional_writes: Option<bool>,
    /// Whether the server stores objects as files: keys that a file system would normalize are refused.
    pub keys_are_paths: bool,
    /// Whether all requests go through the SDK.
    pub force_sdk: bool,
    /// [`Account::fingerprint`](crate::s3::Account::fingerprint) when the configuration was made: if the environment
    /// changes, the endpoint or the credentials may change too.
    pub environment: u64,
    /// Settings of connections.
    pub http: HttpConfig,
}

/// When an object is uploaded to Google Cloud Storage in parts, which are objects until they are composed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ParallelUpload {
    /// If the bucket is known to bill parts as usual and to allow that they are deleted.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never: parts are sent one after the other, as a resumable upload.
    Off,
}

/// Configuration of Google Cloud Storage.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct GcsConfig {
    /// Endpoint; `None`: `STORAGE_EMULATOR_HOST`, otherwise that of the universe.
    pub endpoint_url: Option<String>,
    /// Project that is billed for requests.
    pub user_project: Option<String>,
    /// Domain of the cloud; `None`: `googleapis.com`.
    pub universe_domain: Option<String>,
    /// Source of tokens, instead of Application Default Credentials.
    pub credential_provider: Option<CredentialProvider>,
    /// Whether requests are sent without a token.
    pub anonymous: bool,
    /// Storage class of written objects.
    pub storage_class: Option<String>,
    /// Resource name of the key that encrypts written objects.
    pub kms_key_name: Option<String>,
    /// When an object is uploaded in parts.
    pub parallel_upload: ParallelUpload,
    /// Whether objects are read and written through the crate google-cloud-storage.
    pub force_sdk: bool,
    /// [`Account::fingerprint`](crate::gcs::Account::fingerprint) when the configuration was made.
    pub environment: u64,
    /// Settings of connections.
    pub http: HttpConfig,
}

/// The configuration of one provider: everything that its clients depend on, and nothing of the other providers.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum ProviderConfig {
    /// `s3://`
    S3(Box<S3Config>),
    /// `gs://`
    Gcs(Box<GcsConfig>),
    /// `file://`
    File(FileConfig),
    /// `memory://`
    Memory,
}

/// The configurations of all providers.
#[derive(Clone, Default)]
pub struct ProviderConfigs {
    /// For `s3://`.
    pub s3: S3Config,
    /// For `gs://`.
    pub gcs: GcsConfig,
    /// For `file://`.
    pub file: FileConfig,
}

impl ProviderConfigs {
    /// The configuration for URLs of `scheme`; `None` if no provider has this scheme.
    pub fn for_scheme(&self, scheme: &str) -> Option<ProviderConfig> {
        match scheme {
            "s3" => Some(ProviderConfig::S3(Box::new(self.s3.clone()))),
            "gs" => Some(ProviderConfig::Gcs(Box::new(self.gcs.clone()))),
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
        let gcs = GcsConfig { force_sdk: true, ..GcsConfig::default() };
        let other_gcs = ProviderConfigs { gcs, ..before.clone() };
        let other_file = ProviderConfigs { file: FileConfig { sync: false }, ..before.clone() };
        let changed = |after: &ProviderConfigs| {
            ["s3", "gs", "file", "memory"].map(|scheme| before.for_scheme(scheme) != after.for_scheme(scheme))
        };
        assert_eq!(changed(&other_s3), [true, false, false, false]);
        assert_eq!(changed(&other_gcs), [false, true, false, false]);
        assert_eq!(changed(&other_file), [false, false, true, false]);
        assert!(before.for_scheme("ftp").is_none());
    }
}
