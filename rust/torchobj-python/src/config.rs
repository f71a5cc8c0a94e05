//! Converts configurations of Python to those of Rust. The dataclasses of `torchobj.config` have validated all values.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use torchobj_core::policy::Policy;
use torchobj_store::config::{
    Addressing, Checksum, Encryption, FileConfig, GcsConfig, HttpConfig, ParallelUpload, ProviderConfigs, S3Config,
};
use torchobj_store::env::local_ranks;
use torchobj_store::{gcs, s3};

use crate::credentials::Provider;

/// Bytes of 10^6 bits.
const BYTES_PER_MBIT: f64 = 125_000.0;

/// A `torchobj.S3Options`.
#[derive(FromPyObject)]
struct S3Options {
    region: Option<String>,
    endpoint_url: Option<String>,
    profile: Option<String>,
    #[pyo3(attribute("_credential_source"))]
    credential_source: Option<Provider>,
    anonymous: bool,
    addressing_style: String,
    requester_pays: bool,
    encryption: Option<String>,
    kms_key_id: Option<String>,
    customer_key_file: Option<PathBuf>,
    storage_class: Option<String>,
    checksum: String,
    key_rules: String,
    conditional_writes: AutoOr<bool>,
    force_sdk: bool,
}

/// A `torchobj.GCSOptions`.
#[derive(FromPyObject)]
struct GcsOptions {
    endpoint_url: Option<String>,
    user_project: Option<String>,
    universe_domain: Option<String>,
    #[pyo3(attribute("_credential_source"))]
    credential_source: Option<Provider>,
    anonymous: bool,
    storage_class: Option<String>,
    kms_key_name: Option<String>,
    parallel_upload: AutoOr<bool>,
    force_sdk: bool,
}

/// A `torchobj.FileOptions`.
#[derive(FromPyObject)]
struct FileOptions {
    sync: bool,
}

/// A `torchobj.AdvancedOptions`.
#[derive(FromPyObject)]
struct AdvancedOptions {
    whole_below_bytes: u64,
    max_in_flight_cap: usize,
    connect_timeout_s: f64,
    commit_timeout_s: f64,
    min_bytes_per_s: u64,
    keep_alive_s: f64,
}

/// A value, or "auto".
#[derive(FromPyObject)]
enum AutoOr<T> {
    Fixed(T),
    Auto(#[expect(dead_code, reason = "the dataclass has checked the word")] String),
}

/// A `torchobj.StoreConfig`.
#[derive(FromPyObject)]
pub(crate) struct StoreConfig {
    s3: S3Options,
    gcs: GcsOptions,
    file: FileOptions,
    advanced: AdvancedOptions,
    verify_tls: bool,
    ca_bundle: Option<PathBuf>,
    part_bytes: u64,
    write_buffer_bytes: u64,
    upload_mbit_s: Option<f64>,
    max_in_flight: AutoOr<usize>,
    hedge: bool,
    verify_checksums: bool,
    max_attempts: u32,
    retry_timeout_s: f64,
    first_byte_timeout_s: f64,
    idle_timeout_s: f64,
}

impl StoreConfig {
    /// The configuration of each provider, with the fingerprint of the current environment.
    pub(crate) fn providers(&self) -> ProviderConfigs {
        ProviderConfigs {
            s3: self.s3.config(self.http()),
            gcs: self.gcs.config(self.http()),
            file: FileConfig { sync: self.file.sync },
        }
    }

    fn http(&self) -> HttpConfig {
        HttpConfig {
            connect_timeout: Duration::from_secs_f64(self.advanced.connect_timeout_s),
            keep_alive: Duration::from_secs_f64(self.advanced.keep_alive_s),
            verify_tls: self.verify_tls,
            ca_bundle: self.ca_bundle.clone(),
        }
    }

    /// Retries, timeouts and concurrency.
    pub(crate) fn policy(&self) -> Policy {
        let (max_in_flight, max_in_flight_cap) = match self.max_in_flight {
            AutoOr::Fixed(number) => (number, None),
            AutoOr::Auto(_) => {
                let start = Policy::default().max_in_flight;
                (start.min(self.advanced.max_in_flight_cap), Some(self.advanced.max_in_flight_cap))
            }
        };
        let policy = Policy {
            part_bytes: self.part_bytes,
            whole_below_bytes: self.advanced.whole_below_bytes,
            max_in_flight,
            max_in_flight_cap,
            hedge: self.hedge,
            verify_checksums: self.verify_checksums,
            write_buffer_bytes: self.write_buffer_bytes,
            upload_bytes_per_s: self.upload_mbit_s.map(|rate| (rate * BYTES_PER_MBIT) as u64),
            max_attempts: self.max_attempts,
            retry_timeout: Duration::from_secs_f64(self.retry_timeout_s),
            first_byte_timeout: Duration::from_secs_f64(self.first_byte_timeout_s),
            idle_timeout: Duration::from_secs_f64(self.idle_timeout_s),
            commit_timeout: Duration::from_secs_f64(self.advanced.commit_timeout_s),
            min_bytes_per_s: self.advanced.min_bytes_per_s,
        };
        policy.shared_by(local_ranks())
    }
}

impl S3Options {
    fn config(&self, http: HttpConfig) -> S3Config {
        S3Config {
            region: self.region.clone(),
            endpoint_url: self.endpoint_url.clone(),
            profile: self.profile.clone(),
            credential_provider: self.credential_source.clone().map(|provider| provider.0),
            anonymous: self.anonymous,
            addressing: match self.addressing_style.as_str() {
                "path" => Addressing::Path,
                "virtual" => Addressing::Virtual,
                _ => Addressing::Auto,
            },
            requester_pays: self.requester_pays,
            encryption: match (self.encryption.as_deref(), &self.customer_key_file) {
                (_, Some(file)) => Encryption::CustomerKeyFile(file.clone()),
                (Some("AES256"), None) => Encryption::Aes256,
                (Some(kms), None) => {
                    Encryption::Kms { key_id: self.kms_key_id.clone(), dual_layer: kms == "aws:kms:dsse" }
                }
                (None, None) => Encryption::Bucket,
            },
            storage_class: self.storage_class.clone(),
            checksum: match self.checksum.as_str() {
                "crc64nvme" => Checksum::Crc64Nvme,
                "crc32c" => Checksum::Crc32C,
                "none" => Checksum::Off,
                _ => Checksum::Auto,
            },
            conditional_writes: match self.conditional_writes {
                AutoOr::Auto(_) => None,
                AutoOr::Fixed(conditional) => Some(conditional),
            },
            keys_are_paths: self.key_rules == "path",
            force_sdk: self.force_sdk,
            environment: s3::Account::fingerprint(),
            http,
        }
    }
}

impl GcsOptions {
    fn config(&self, http: HttpConfig) -> GcsConfig {
        GcsConfig {
            endpoint_url: self.endpoint_url.clone(),
            user_project: self.user_project.clone(),
            universe_domain: self.universe_domain.clone(),
            credential_provider: self.credential_source.clone().map(|provider| provider.0),
            anonymous: self.anonymous,
            storage_class: self.storage_class.clone(),
            kms_key_name: self.kms_key_name.clone(),
            parallel_upload: match self.parallel_upload {
                AutoOr::Auto(_) => ParallelUpload::Auto,
                AutoOr::Fixed(true) => ParallelUpload::On,
                AutoOr::Fixed(false) => ParallelUpload::Off,
            },
            force_sdk: self.force_sdk,
            environment: gcs::Account::fingerprint(),
            http,
        }
    }
}

/// Returns the default configuration of Rust, with the field names of Python. A test compares both.
#[pyfunction]
pub(crate) fn default_config(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (policy, http, file) = (Policy::default(), HttpConfig::default(), PyDict::new(py));
    file.set_item("sync", FileConfig::default().sync)?;
    let defaults = PyDict::new(py);
    defaults.set_item("part_bytes", policy.part_bytes)?;
    defaults.set_item("whole_below_bytes", policy.whole_below_bytes)?;
    defaults.set_item("write_buffer_bytes", policy.write_buffer_bytes)?;
    defaults.set_item("upload_mbit_s", policy.upload_bytes_per_s)?;
    defaults.set_item("max_in_flight", policy.max_in_flight_cap.map(|_| "auto"))?;
    defaults.set_item("max_in_flight_cap", policy.max_in_flight_cap)?;
    defaults.set_item("hedge", policy.hedge)?;
    defaults.set_item("verify_checksums", policy.verify_checksums)?;
    defaults.set_item("max_attempts", policy.max_attempts)?;
    defaults.set_item("retry_timeout_s", policy.retry_timeout.as_secs_f64())?;
    defaults.set_item("first_byte_timeout_s", policy.first_byte_timeout.as_secs_f64())?;
    defaults.set_item("idle_timeout_s", policy.idle_timeout.as_secs_f64())?;
    defaults.set_item("commit_timeout_s", policy.commit_timeout.as_secs_f64())?;
    defaults.set_item("min_bytes_per_s", policy.min_bytes_per_s)?;
    defaults.set_item("connect_timeout_s", http.connect_timeout.as_secs_f64())?;
    defaults.set_item("keep_alive_s", http.keep_alive.as_secs_f64())?;
    defaults.set_item("verify_tls", http.verify_tls)?;
    defaults.set_item("file", file)?;
    Ok(defaults)
}
