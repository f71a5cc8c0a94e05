//! Objects by name, and reading them as readers in the process that asks.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, Result as Done};
use torchobj_core::manifest::Object;
use torchobj_core::object_ref::ObjectRef as Named;
use torchobj_core::read::{Job, get_many};
use torchobj_core::types::Version;
use torchobj_core::url::ObjectUrl;

use crate::buffer::{Buffer, ObjectReader};
use crate::config::StoreConfig;
use crate::error::{OrRaise, exception, out_of_range};
use crate::process::{self, StoreKey};
use crate::wait::wait;

/// An object, or bytes `start..end` of it, by its URL; the end is excluded, and one behind the object's is cut.
///
/// `size` is that of the whole object, where it is known: it saves a request for objects of many MiB, and tells how much
/// memory the object will take; an object of another size is an error. `version` is the one that must answer: the ETag on
/// S3; another one is an `ObjectChangedError`. Nothing is asked of the store here. Cannot be changed; can be pickled, compared and hashed.
///
/// Raises `ConfigError`: the URL names no object, or is longer than 16 KiB; a number is negative; the range ends before
/// it begins.
#[pyclass(module = "torchobj", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct ObjectRef {
    named: Arc<Named>,
}

#[pymethods]
impl ObjectRef {
    #[new]
    #[pyo3(signature = (url, start=None, end=None, size=None, version=None))]
    fn new(
        py: Python<'_>,
        url: String,
        start: Option<i64>,
        end: Option<i64>,
        size: Option<i64>,
        version: Option<String>,
    ) -> PyResult<Self> {
        let number = |name: &str, value: Option<i64>| {
            value.map(|value| u64::try_from(value).map_err(|_| out_of_range(&url, name, value))).transpose()
        };
        let (start, end, size) = (number("start", start)?, number("end", end)?, number("size", size)?);
        let named = Named::new(url, start.unwrap_or(0), end, size, version.map(Version::new)).or_raise(py)?;
        Ok(Self { named: Arc::new(named) })
    }

    /// The URL.
    #[getter]
    fn url(&self) -> &str {
        self.named.url()
    }

    /// The key, raw.
    #[getter]
    fn key(&self) -> &str {
        self.named.key()
    }

    /// Where the range begins, in bytes; 0 for the whole object.
    #[getter]
    fn start(&self) -> u64 {
        self.named.start()
    }

    /// Where the range ends; None for the end of the object.
    #[getter]
    fn end(&self) -> Option<u64> {
        self.named.end()
    }

    /// Size of the whole object in bytes, where it is known.
    #[getter]
    fn size(&self) -> Option<u64> {
        self.named.size()
    }

    /// The version that must answer.
    #[getter]
    fn version(&self) -> Option<&str> {
        self.named.version().map(Version::as_str)
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let (class, (url, start, end, size, version)) = Self::__reduce__(slf);
        let mut text = format!("{}({}", class.getattr("__name__")?, url.into_pyobject(slf.py())?.repr()?);
        for (name, value) in [("start", Some(start).filter(|start| *start > 0)), ("end", end), ("size", size)] {
            if let Some(value) = value {
                text += &format!(", {name}={value}");
            }
        }
        if let Some(version) = version {
            text += &format!(", version={}", version.into_pyobject(slf.py())?.repr()?);
        }
        Ok(text + ")")
    }

    #[expect(clippy::type_complexity, reason = "what the constructor takes")]
    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> (Bound<'py, PyAny>, (String, u64, Option<u64>, Option<u64>, Option<String>)) {
        let Self { named } = slf.get();
        let version = named.version().map(|version| version.as_str().to_owned());
        (slf.get_type().into_any(), (named.url().to_owned(), named.start(), named.end(), named.size(), version))
    }
}

impl ObjectRef {
    pub(crate) fn named(&self) -> Arc<Named> {
        self.named.clone()
    }
}

/// Makes the clients of a configuration, by base. The same environment counts for all: that of when this is made.
pub(crate) fn clients(config: &StoreConfig) -> impl Fn(&str) -> Done<Arc<Client>> + Send + Sync + 'static {
    let environment = torchobj_store::env::fingerprint();
    let (providers, policy) = (config.providers(), config.policy());
    move |base| {
        let ObjectUrl { scheme, bucket, .. } = ObjectUrl::parse(base)?;
        process::client(&StoreKey::new(&scheme, bucket, &providers, policy.clone(), environment)?)
    }
}

/// A list of readers, with exceptions in place of what could not be read.
pub(crate) fn readers<'py>(
    py: Python<'py>,
    names: &[Arc<Named>],
    results: impl Iterator<Item = Done<Buffer>>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for (name, result) in names.iter().zip(results) {
        match result {
            Ok(buffer) => {
                let object = Object { base: name.base(), key: name.key(), size: None, version: None };
                list.append(ObjectReader::of(py, object, buffer)?)?;
            }
            Err(error) => list.append(exception(py, &error).into_value(py))?,
        }
    }
    Ok(list)
}

/// Reads objects of any stores as readers, all at once; there is an exception in place of what could not be read.
#[pyfunction]
pub(crate) fn read_refs<'py>(
    py: Python<'py>,
    config: StoreConfig,
    refs: Vec<PyRef<'py, ObjectRef>>,
) -> PyResult<Bound<'py, PyList>> {
    let names: Vec<Arc<Named>> = refs.iter().map(|object| object.named()).collect();
    let client_of = clients(&config);
    let mut jobs = Vec::with_capacity(names.len());
    let mut refused: Vec<Option<Error>> = Vec::with_capacity(names.len());
    py.detach(|| {
        let mut known: Option<(&str, Arc<Client>)> = None;
        for name in &names {
            let client = match &known {
                Some((base, client)) if *base == name.base() => Ok(client.clone()),
                _ => client_of(name.base()),
            };
            match client {
                Ok(client) => {
                    known = Some((name.base(), client.clone()));
                    jobs.push(Job { client, read: name.read() });
                    refused.push(None);
                }
                Err(error) => refused.push(Some(error)),
            }
        }
    });
    let mut landed = wait(py, get_many(jobs, false))?.into_iter();
    let results = refused.into_iter().map(|refused| match refused {
        Some(error) => Err(error),
        None => landed.next().expect("one for each job").map(|landed| landed.buffer.into()),
    });
    readers(py, &names, results)
}
