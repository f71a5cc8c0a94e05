//! Converts errors to exceptions of `torchobj.exceptions`, by their kind.

use std::error::Error as _;
use std::io;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use torchobj_core::error::{Error, ErrorKind};
use torchobj_core::tar::TarError;

pyo3::import_exception!(torchobj.exceptions, ConfigError);

/// An exception of a class of `torchobj.exceptions`, whose attributes `describe` sets.
fn made(
    py: Python<'_>,
    class: &str,
    message: String,
    describe: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>,
) -> PyErr {
    let make = || {
        let exception = py.import("torchobj.exceptions")?.getattr(class)?.call1((message,))?;
        describe(&exception)?;
        PyResult::Ok(PyErr::from_value(exception))
    };
    make().unwrap_or_else(|problem| problem)
}

/// Converts an error.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error.kind() {
        ErrorKind::NotFound => "ObjectNotFoundError",
        ErrorKind::NoBucket => "BucketNotFoundError",
        ErrorKind::AccessDenied => "AccessDeniedError",
        ErrorKind::Credentials | ErrorKind::ExpiredCredentials => "CredentialsError",
        ErrorKind::Changed => "ObjectChangedError",
        ErrorKind::Precondition => "PreconditionFailedError",
        ErrorKind::Range => "RangeError",
        ErrorKind::InvalidKey => "InvalidKeyError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::Config => "ConfigError",
        ErrorKind::Throttled => "ThrottledError",
        ErrorKind::Timeout => "StoreTimeoutError",
        ErrorKind::Connect | ErrorKind::Reset | ErrorKind::Stale | ErrorKind::ShortBody => "StoreConnectionError",
        ErrorKind::Integrity => "IntegrityError",
        _ => "StoreError",
    };
    made(py, class, error.to_string(), |exception| {
        exception.setattr("url", error.url())?;
        exception.setattr("operation", error.operation().to_string())?;
        exception.setattr("status", error.status())?;
        exception.setattr("code", error.code())?;
        exception.setattr("request_id", error.request_id())?;
        exception.setattr("attempts", error.attempts())?;
        let errno = error.source().and_then(|source| source.downcast_ref::<io::Error>()?.raw_os_error());
        match errno.filter(|_| exception.is_instance_of::<PyOSError>()) {
            Some(errno) => exception.setattr("errno", errno),
            None => Ok(()),
        }
    })
}

/// Converts an error of a tar shard.
pub(crate) fn tar_exception(py: Python<'_>, url: &str, error: &TarError) -> PyErr {
    made(py, "TarError", format!("tar shard {url}: {error}"), |exception| {
        exception.setattr("url", url)?;
        exception.setattr("offset", error.offset)
    })
}

/// A `ConfigError` about an argument.
pub(crate) fn invalid(message: String) -> PyErr {
    ConfigError::new_err(message)
}

/// Converts the error of a result.
pub(crate) trait OrRaise<T> {
    /// Returns the value, or the error as an exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, Error> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error))
    }
}
