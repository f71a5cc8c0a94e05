//! Converts errors to exceptions of `torchobj.exceptions`, by their kind.

use pyo3::PyTypeInfo;
use pyo3::prelude::*;
use torchobj_core::error::{Error, ErrorKind};
use torchobj_core::tar::TarError;

/// The exception classes.
mod classes {
    pyo3::import_exception!(torchobj.exceptions, AccessDeniedError);
    pyo3::import_exception!(torchobj.exceptions, BucketNotFoundError);
    pyo3::import_exception!(torchobj.exceptions, ConfigError);
    pyo3::import_exception!(torchobj.exceptions, CredentialsError);
    pyo3::import_exception!(torchobj.exceptions, IntegrityError);
    pyo3::import_exception!(torchobj.exceptions, InvalidKeyError);
    pyo3::import_exception!(torchobj.exceptions, ObjectChangedError);
    pyo3::import_exception!(torchobj.exceptions, ObjectNotFoundError);
    pyo3::import_exception!(torchobj.exceptions, PreconditionFailedError);
    pyo3::import_exception!(torchobj.exceptions, RangeError);
    pyo3::import_exception!(torchobj.exceptions, StoreConnectionError);
    pyo3::import_exception!(torchobj.exceptions, StoreError);
    pyo3::import_exception!(torchobj.exceptions, StoreTimeoutError);
    pyo3::import_exception!(torchobj.exceptions, TarError);
    pyo3::import_exception!(torchobj.exceptions, ThrottledError);
    pyo3::import_exception!(torchobj.exceptions, UnsupportedError);
}

fn new<E: PyTypeInfo>(message: String) -> PyErr {
    PyErr::new::<E, _>(message)
}

/// Converts an error.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let build = match error.kind() {
        ErrorKind::NotFound => new::<classes::ObjectNotFoundError>,
        ErrorKind::NoBucket => new::<classes::BucketNotFoundError>,
        ErrorKind::AccessDenied => new::<classes::AccessDeniedError>,
        ErrorKind::Credentials | ErrorKind::ExpiredCredentials => new::<classes::CredentialsError>,
        ErrorKind::Changed => new::<classes::ObjectChangedError>,
        ErrorKind::Precondition => new::<classes::PreconditionFailedError>,
        ErrorKind::Range => new::<classes::RangeError>,
        ErrorKind::InvalidKey => new::<classes::InvalidKeyError>,
        ErrorKind::Unsupported => new::<classes::UnsupportedError>,
        ErrorKind::Config => new::<classes::ConfigError>,
        ErrorKind::Throttled => new::<classes::ThrottledError>,
        ErrorKind::Timeout => new::<classes::StoreTimeoutError>,
        ErrorKind::Connect | ErrorKind::Reset | ErrorKind::Stale | ErrorKind::ShortBody => {
            new::<classes::StoreConnectionError>
        }
        ErrorKind::Integrity => new::<classes::IntegrityError>,
        _ => new::<classes::StoreError>,
    };
    let exception = build(error.to_string());
    let value = exception.value(py);
    let set = [
        value.setattr("url", error.url()),
        value.setattr("operation", error.operation().to_string()),
        value.setattr("status", error.status()),
        value.setattr("code", error.code()),
        value.setattr("request_id", error.request_id()),
        value.setattr("attempts", error.attempts()),
    ];
    match set.into_iter().find_map(Result::err) {
        Some(problem) => problem,
        None => exception,
    }
}

/// Converts an error of a tar shard.
pub(crate) fn tar_exception(py: Python<'_>, url: &str, error: &TarError) -> PyErr {
    let exception = classes::TarError::new_err(format!("tar shard {url}: {error}"));
    let value = exception.value(py);
    match value.setattr("url", url).and_then(|()| value.setattr("offset", error.offset)) {
        Ok(()) => exception,
        Err(problem) => problem,
    }
}

/// A `ConfigError` about a negative argument of an `ObjectRef`.
pub(crate) fn out_of_range(url: &str, name: &str, value: i64) -> PyErr {
    classes::ConfigError::new_err(format!("{url}: {name}={value}: must be 0 or more"))
}

/// A `ConfigError` about an argument.
pub(crate) fn invalid(message: String) -> PyErr {
    classes::ConfigError::new_err(message)
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
