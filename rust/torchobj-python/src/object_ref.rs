//! References to objects, and reading them in the calling process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, Result as Done};
use torchobj_core::manifest::ObjectInfo;
use torchobj_core::object_ref::ObjectRef as Named;
use torchobj_core::read::{ClientRead, get_many};
use torchobj_core::types::Version;
use torchobj_core::url::ObjectUrl;

use crate::buffer::{Buffer, ObjectReader};
use crate::config::StoreConfig;
use crate::error::{OrRaise, exception, invalid};
use crate::process::{self, StoreKey};
use crate::wait::wait;

/// A reference to an object, or to bytes `start..end` of it.
///
/// Creating one sends no request. It is immutable, and can be pickled, compared and hashed.
///
/// Args:
///     url: `s3://bucket/key`, `file:///folder/file` or `memory://name/key`; at most 16 KiB.
///     start: First byte of the range; None: 0.
///     end: End of the range, exclusive; clamped to the size of the object. None: the end of the object.
///     size: Size of the whole object in bytes, if it is known. It saves a request for large objects, and determines
///         the memory that is reserved for it. Reading an object of another size is an error.
///     version: The version to read: on S3 the ETag, on GCS the generation, which may be noncurrent. Reading another
///         one raises `ObjectChangedError`.
///
/// Raises:
///     ConfigError: The URL has no key or is too long, a number is negative, or the range ends before it begins.
///
/// Example:
///     >>> ObjectRef("s3://bucket/shard.bin", start=1024, end=2048).key
///     'shard.bin'
#[pyclass(module = "torchobj", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct ObjectRef {
    pub(crate) named: Arc<Named>,
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
            let negative = |value| invalid(format!("{url}: {name}={value}: must be 0 or more"));
            value.map(|value| u64::try_from(value).map_err(|_| negative(value))).transpose()
        };
        let (start, end, size) = (number("start", start)?, number("end", end)?, number("size", size)?);
        let named = Named::new(url, start.unwrap_or(0), end, size, version.map(Version::new)).or_raise(py)?;
        Ok(Self { named: Arc::new(named) })
    }

    /// URL of the object.
    #[getter]
    fn url(&self) -> &str {
        self.named.url()
    }

    /// Key of the object, not percent-encoded.
    #[getter]
    fn key(&self) -> &str {
        self.named.key()
    }

    /// First byte of the range; 0 for the whole object.
    #[getter]
    fn start(&self) -> u64 {
        self.named.start()
    }

    /// End of the range, exclusive; None for the end of the object.
    #[getter]
    fn end(&self) -> Option<u64> {
        self.named.end()
    }

    /// Size of the whole object in bytes; None if unknown.
    #[getter]
    fn size(&self) -> Option<u64> {
        self.named.size()
    }

    /// The version to read; None for any.
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

    #[expect(clippy::type_complexity, reason = "the arguments of the constructor")]
    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> (Bound<'py, PyAny>, (String, u64, Option<u64>, Option<u64>, Option<String>)) {
        let Self { named } = slf.get();
        let version = named.version().map(|version| version.as_str().to_owned());
        (slf.get_type().into_any(), (named.url().to_owned(), named.start(), named.end(), named.size(), version))
    }
}

/// Returns a function that returns the client of an object. `configs` maps prefixes of URLs to configurations: `s3://b/folder`,
/// `s3://b`, `s3://`, and last an empty prefix for all others. Clients use the environment at the time of this call.
pub(crate) fn client_of(
    configs: Vec<(String, StoreConfig)>,
) -> impl Fn(&Named) -> Done<Arc<Client>> + Send + Sync + use<> + 'static {
    // For each configuration by base.
    let known: Mutex<Vec<HashMap<String, Arc<Client>>>> = Mutex::new(vec![HashMap::new(); configs.len()]);
    move |object| {
        let applies = |prefix: &str| {
            let rest = object.url().strip_prefix(prefix);
            rest.is_some_and(|rest| {
                prefix.is_empty() || prefix.ends_with("://") || rest.is_empty() || rest.starts_with('/')
            })
        };
        let position = configs.iter().position(|(prefix, _)| applies(prefix));
        let position = position.expect("the last prefix is empty and matches all");
        let known = &mut known.lock().expect("no holder of this lock panics")[position];
        if let Some(client) = known.get(object.base()) {
            return Ok(client.clone());
        }
        let ObjectUrl { scheme, bucket, .. } = ObjectUrl::parse(object.base())?;
        let config = configs[position].1.clone();
        let client = process::client(&StoreKey::new(&scheme, bucket, String::new(), config)?)?;
        known.insert(object.base().to_owned(), client.clone());
        Ok(client)
    }
}

/// A list of the readers of objects.
///
/// With `return_errors` it contains an exception for each object that could not be read; otherwise the first one is raised.
pub(crate) fn readers<'a, 'py>(
    py: Python<'py>,
    objects: impl Iterator<Item = ObjectInfo<'a>>,
    results: impl Iterator<Item = Done<Buffer>>,
    return_errors: bool,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for (object, result) in objects.zip(results) {
        match result {
            Ok(buffer) => list.append(ObjectReader::of(py, object, buffer)?)?,
            Err(error) if return_errors => list.append(exception(py, &error).into_value(py))?,
            Err(error) => return Err(exception(py, &error)),
        }
    }
    Ok(list)
}

/// Reads objects of any stores concurrently, with the GIL released.
///
/// Args:
///     configs: Pairs of a URL prefix and its configuration, the most specific first; the last prefix is empty.
///     refs: The objects.
///
/// Returns:
///     For each object an `ObjectReader`, or the exception if it could not be read.
#[pyfunction]
pub(crate) fn read_refs<'py>(
    py: Python<'py>,
    configs: Vec<(String, StoreConfig)>,
    refs: Vec<PyRef<'py, ObjectRef>>,
) -> PyResult<Bound<'py, PyList>> {
    let names: Vec<Arc<Named>> = refs.iter().map(|object| object.named.clone()).collect();
    let client_of = client_of(configs);
    let mut jobs = Vec::with_capacity(names.len());
    let mut refused: Vec<Option<Error>> = Vec::with_capacity(names.len());
    py.detach(|| {
        for name in &names {
            match client_of(name) {
                Ok(client) => {
                    jobs.push(ClientRead::new(client, name.read()));
                    refused.push(None);
                }
                Err(error) => refused.push(Some(error)),
            }
        }
    });
    let mut fetched = wait(py, get_many(jobs))?.into_iter();
    let results = refused.into_iter().map(|refused| match refused {
        Some(error) => Err(error),
        None => fetched.next().expect("there is one result per job").map(|fetched| fetched.buffer.into()),
    });
    readers(py, names.iter().map(|name| name.object()), results, true)
}
