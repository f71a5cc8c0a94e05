//! Converts configurations of Python to those of Rust. The dataclasses of `torchobj.config` have validated all values.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use torchobj_core::cache::CacheConfig;
use torchobj_core::file_store::FileConfig;
use torchobj_core::policy::Policy;
use torchobj_store::config::{
    Addressing, Checksum, Encryption, GcsConfig, HttpConfig, ParallelUpload, ProviderConfigs, S3Config,
};
use torchobj_store::env::local_ranks;
use torchobj_store::{gcs, s3};

use crate::credentials;

/// Bytes of 10^6 bits.
const BYTES_PER_MBIT: f64 = 125_000.0;

/// A `torchobj.StoreConfig`, at the time of the call that it is an argument of.
#[derive(Clone)]
pub(crate) struct StoreConfig {
    /// The configuration of each provider, with the fingerprint of the current environment.
    pub(crate) providers: ProviderConfigs,
    /// Retries, timeouts and concurrency.
    pub(crate) policy: Policy,
    /// The disk cache.
    pub(crate) cache: Option<CacheConfig>,
}

impl<'py> FromPyObject<'_, 'py> for StoreConfig {
    type Error = PyErr;

    fn extract(config: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let advanced = config.getattr("advanced")?;
        let http = HttpConfig {
            connect_timeout: seconds(&advanced, "connect_timeout_s")?,
            keep_alive: seconds(&advanced, "keep_alive_s")?,
            verify_tls: field(&config, "verify_tls")?,
            ca_bundle: field(&config, "ca_bundle")?,
        };
        let providers = ProviderConfigs {
            s3: s3_config(&config.getattr("s3")?, http.clone())?,
            gcs: gcs_config(&config.getattr("gcs")?, http)?,
            file: FileConfig { sync: field(&config.getattr("file")?, "sync")? },
        };
        let policy = policy(&config, &advanced)?.shared_by(local_ranks());
        Ok(Self { providers, policy, cache: cache_config(&config.getattr("cache")?)? })
    }
}

/// A field of a dataclass.
fn field<'py, T: FromPyObjectOwned<'py>>(options: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    options.getattr(name)?.extract().map_err(Into::into)
}

/// A field whose value may be "auto", which is `None`.
fn unless_auto<'py, T: FromPyObjectOwned<'py>>(options: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<T>> {
    if options.getattr(name)?.is_instance_of::<PyString>() { Ok(None) } else { field(options, name).map(Some) }
}

fn seconds(options: &Bound<'_, PyAny>, name: &str) -> PyResult<Duration> {
    field(options, name).map(Duration::from_secs_f64)
}

/// The policy of a `StoreConfig` and its `AdvancedOptions`.
fn policy(config: &Bound<'_, PyAny>, advanced: &Bound<'_, PyAny>) -> PyResult<Policy> {
    let cap = field(advanced, "max_in_flight_cap")?;
    let (max_in_flight, max_in_flight_cap) = match unless_auto(config, "max_in_flight")? {
        Some(number) => (number, None),
        None => (Policy::default().max_in_flight.min(cap), Some(cap)),
    };
    let upload_mbit_s: Option<f64> = field(config, "upload_mbit_s")?;
    Ok(Policy {
        part_bytes: field(config, "part_bytes")?,
        whole_below_bytes: field(advanced, "whole_below_bytes")?,
        max_in_flight,
        max_in_flight_cap,
        hedge: field(config, "hedge")?,
        verify_checksums: field(config, "verify_checksums")?,
        write_buffer_bytes: field(config, "write_buffer_bytes")?,
        upload_bytes_per_s: upload_mbit_s.map(|rate| (rate * BYTES_PER_MBIT) as u64),
        max_attempts: field(config, "max_attempts")?,
        retry_timeout: seconds(config, "retry_timeout_s")?,
        first_byte_timeout: seconds(config, "first_byte_timeout_s")?,
        idle_timeout: seconds(config, "idle_timeout_s")?,
        commit_timeout: seconds(advanced, "commit_timeout_s")?,
        min_bytes_per_s: field(advanced, "min_bytes_per_s")?,
    })
}

/// The configuration of a `CacheOptions`; `None` without a folder.
fn cache_config(options: &Bound<'_, PyAny>) -> PyResult<Option<CacheConfig>> {
    let Some(folder) = field(options, "folder")? else { return Ok(None) };
    Ok(Some(CacheConfig {
        folder,
        max_bytes: field(options, "max_bytes")?,
        min_free_bytes: field(options, "min_free_bytes")?,
        max_object_bytes: field(options, "max_object_bytes")?,
        ttl: seconds(options, "ttl_s")?,
        admit: field(options, "admit")?,
    }))
}

/// The configuration of an `S3Options`.
fn s3_config(options: &Bound<'_, PyAny>, http: HttpConfig) -> PyResult<S3Config> {
    let encryption: Option<String> = field(options, "encryption")?;
    Ok(S3Config {
        region: field(options, "region")?,
        endpoint_url: field(options, "endpoint_url")?,
        profile: field(options, "profile")?,
        credential_provider: credentials::provider(options)?,
        anonymous: field(options, "anonymous")?,
        addressing: match field::<String>(options, "addressing_style")?.as_str() {
            "path" => Addressing::Path,
            "virtual" => Addressing::Virtual,
            _ => Addressing::Auto,
        },
        requester_pays: field(options, "requester_pays")?,
        encryption: match (encryption.as_deref(), field(options, "customer_key_file")?) {
            (_, Some(file)) => Encryption::CustomerKeyFile(file),
            (Some("AES256"), None) => Encryption::Aes256,
            (Some(kms), None) => {
                Encryption::Kms { key_id: field(options, "kms_key_id")?, dual_layer: kms == "aws:kms:dsse" }
            }
            (None, None) => Encryption::Bucket,
        },
        storage_class: field(options, "storage_class")?,
        checksum: match field::<String>(options, "checksum")?.as_str() {
            "crc64nvme" => Checksum::Crc64Nvme,
            "crc32c" => Checksum::Crc32C,
            "none" => Checksum::Off,
            _ => Checksum::Auto,
        },
        conditional_writes: unless_auto(options, "conditional_writes")?,
        keys_are_paths: field::<String>(options, "key_rules")? == "path",
        force_sdk: field(options, "force_sdk")?,
        environment: s3::Account::fingerprint(),
        http,
    })
}

/// The configuration of a `GCSOptions`.
fn gcs_config(options: &Bound<'_, PyAny>, http: HttpConfig) -> PyResult<GcsConfig> {
    Ok(GcsConfig {
        endpoint_url: field(options, "endpoint_url")?,
        user_project: field(options, "user_project")?,
        universe_domain: field(options, "universe_domain")?,
        credential_provider: credentials::provider(options)?,
        anonymous: field(options, "anonymous")?,
        storage_class: field(options, "storage_class")?,
        kms_key_name: field(options, "kms_key_name")?,
        parallel_upload: match unless_auto(options, "parallel_upload")? {
            None => ParallelUpload::Auto,
            Some(true) => ParallelUpload::On,
            Some(false) => ParallelUpload::Off,
        },
        force_sdk: field(options, "force_sdk")?,
        environment: gcs::Account::fingerprint(),
        http,
    })
}

/// Returns where the credentials that a configuration signs requests of S3 with come from, without their values.
///
/// Sends no requests. `anonymous` and a `credential_provider` are not considered.
///
/// Returns:
///     Whether the source is known to have some: False for the role of the machine, None if it cannot be used. Its name, or the
///     reason. The next step, or an empty text.
#[pyfunction]
pub(crate) fn s3_credential_source(config: StoreConfig) -> (Option<bool>, String, String) {
    match s3::Account::credential_source(&config.providers.s3) {
        Ok((name, is_known)) => (Some(is_known), name, String::new()),
        Err((message, hint)) => (None, message, hint),
    }
}

/// Returns the path of the CA certificates that a configuration trusts for S3; None: those of the system.
#[pyfunction]
pub(crate) fn s3_ca_bundle(config: StoreConfig) -> Option<PathBuf> {
    s3::Account::ca_bundle(&config.providers.s3)
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
