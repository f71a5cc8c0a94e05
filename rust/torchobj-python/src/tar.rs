//! Samples of tar shards as dicts of Python, and their positions for an index.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};
use torchobj_core::buffer::{Buffer as CoreBuffer, SharedBuffer};
use torchobj_core::tar::{Compression, ExtensionCache, Member, Position, Reader, Sample, TarError, Walk};

use crate::buffer::{Buffer, ObjectReader};
use crate::error::{invalid, tar_exception};

/// Bytes that are in memory.
#[derive(FromPyObject)]
pub(crate) enum Data<'py> {
    Buffer(Bound<'py, Buffer>),
    Reader(Bound<'py, ObjectReader>),
}

impl<'py> Data<'py> {
    fn buffer(self, py: Python<'py>) -> PyResult<Bound<'py, Buffer>> {
        match self {
            Self::Buffer(buffer) => Ok(buffer),
            Self::Reader(reader) => Ok(reader.borrow().in_memory(py)?.into_bound(py)),
        }
    }
}

/// A name, as Python decodes names of files: invalid bytes become surrogates.
fn decoded<'py>(py: Python<'py>, name: &[u8]) -> PyResult<Bound<'py, PyString>> {
    match std::str::from_utf8(name) {
        Ok(name) => Ok(PyString::new(py, name)),
        Err(_) => PyString::from_encoded_object(&PyBytes::new(py, name), Some(c"utf-8"), Some(c"surrogateescape")),
    }
}

/// Strings of the extensions so far.
#[derive(Default)]
struct Extensions(ExtensionCache<Py<PyString>>);

impl Extensions {
    fn get<'py>(&mut self, py: Python<'py>, extension: &[u8]) -> PyResult<Bound<'py, PyString>> {
        if let Some(known) = self.0.get(extension) {
            return Ok(known.bind(py).clone());
        }
        let decoded = decoded(py, extension)?;
        self.0.keep(extension, || decoded.clone().unbind());
        Ok(decoded)
    }
}

/// Reads the samples of a tar shard from its bytes as they arrive.
///
/// A sample is made of consecutive files whose names differ only in the extension, which is the part after the first dot of
/// the file name, in lower case. Samples are equal to those of the `webdataset` package. Folders, links, files without an
/// extension and metadata (`__name__` or in a folder of such a name) are skipped. Names are UTF-8; other bytes become
/// surrogates (`surrogateescape`).
///
/// The shard may be v7, ustar, GNU or pax. It ends with a block of zeros, or between two members. What follows the block of
/// zeros is ignored. Sparse members are refused, and so are global pax headers that set the path or the size of all members.
///
/// Not thread-safe.
///
/// Args:
///     url: URL of the shard, for `__url__` and for messages.
///     compression: `"gzip"` or `"zstd"`; None: not compressed.
///     position: Offset of the header to start with, in bytes: that of a sample, `begin` or `end`. Must be 0 for a compressed
///         shard.
///
/// Raises:
///     ConfigError: `compression` is unknown, or `position` is not an offset of a header.
///
/// Example:
///     >>> import io, tarfile
///     >>> file = io.BytesIO()
///     >>> with tarfile.open(fileobj=file, mode="w") as tar:
///     ...     tar.addfile(tarfile.TarInfo("images/001.txt"))
///     >>> reader = TarReader("s3://bucket/shard.tar")
///     >>> [(begin, end, key, sample)] = reader.push(Buffer(file.getvalue()))
///     >>> begin, end, key, sorted(sample)
///     (0, 512, 'images/001', ['__key__', '__url__', 'txt'])
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct TarReader {
    url: Py<PyString>,
    reader: Reader,
    extensions: Extensions,
    /// An error to raise by the next call, because this one returns samples.
    failed: Option<TarError>,
}

/// Begin, end, key, and a dict or an exception.
type Entry<'py> = (u64, u64, Bound<'py, PyString>, Bound<'py, PyAny>);

#[pymethods]
impl TarReader {
    #[new]
    #[pyo3(signature = (url, compression=None, position=0))]
    fn new(url: Py<PyString>, compression: Option<&str>, position: i64) -> PyResult<Self> {
        let compression = match compression {
            None => None,
            Some("gzip") => Some(Compression::Gzip),
            Some("zstd") => Some(Compression::Zstd),
            Some(other) => {
                return Err(invalid(format!("compression={other:?}: must be None, \"gzip\" or \"zstd\"")));
            }
        };
        let offset = u64::try_from(position).ok().filter(|position| position.is_multiple_of(512));
        let Some(offset) = offset.filter(|offset| *offset == 0 || compression.is_none()) else {
            let rule = "must be the offset of a header, a multiple of 512, and 0 for a compressed shard";
            return Err(invalid(format!("position={position}: {rule}")));
        };
        let reader = Reader::new(compression, offset);
        Ok(Self { url, reader, extensions: Extensions::default(), failed: None })
    }

    /// Continues with the next bytes of the shard. They may end anywhere.
    ///
    /// The buffers of a sample share the memory of `data`; only those of members that span several calls, or of a compressed
    /// shard, have their own. The memory lives until all of them are deleted.
    ///
    /// Decompresses about 64 MiB at most. While `pending` is true, call it again with an empty buffer for the rest.
    ///
    /// Args:
    ///     data: The bytes: a `Buffer`, or an `ObjectReader` of bytes in memory.
    ///
    /// Returns:
    ///     The samples that became complete: offset of the first header, offset after the last member, key, and a dict of
    ///     `__key__`, `__url__`, and a `Buffer` by extension. Offsets are those after decompression. If an extension occurs
    ///     twice in a sample, a `TarError` takes the place of the dict.
    ///
    /// Raises:
    ///     TarError: The bytes are not a tar, a header or the compressed bytes are damaged, a member is sparse, a name is
    ///         longer than 64 KiB, or a sample has more than 256 MiB and than 100 times its compressed bytes. If samples became
    ///         complete before, these are returned, and the next call raises the error.
    fn push<'py>(&mut self, py: Python<'py>, data: Data<'py>) -> PyResult<Bound<'py, PyList>> {
        let buffer = data.buffer(py)?;
        let shared = Buffer::shared(&buffer)?;
        self.samples(py, |reader, samples| reader.push(&shared, samples))
    }

    /// Ends the shard.
    ///
    /// Returns:
    ///     The remaining samples, as `push`; of a compressed shard all that were pending.
    ///
    /// Raises:
    ///     TarError: The shard is empty or ends in the middle of a member, of a header or of the compressed bytes; or as
    ///         `push`.
    fn finish<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.samples(py, Reader::finish)
    }

    /// Whether `push` of an empty buffer would continue: bytes of a compressed shard are not yet decompressed.
    #[getter]
    fn pending(&self) -> bool {
        self.failed.is_none() && self.reader.is_pending()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<torchobj._torchobj.TarReader {}>", self.url.bind(py))
    }
}

impl TarReader {
    /// Returns the samples of a call to the reader.
    fn samples<'py>(
        &mut self,
        py: Python<'py>,
        read: impl FnOnce(&mut Reader, &mut Vec<Sample<CoreBuffer>>) -> Result<(), TarError> + Send,
    ) -> PyResult<Bound<'py, PyList>> {
        if let Some(failed) = &self.failed {
            return Err(self.exception(py, failed));
        }
        let mut samples = Vec::new();
        let reader = &mut self.reader;
        let result = py.detach(|| read(reader, &mut samples));
        if let Err(error) = result {
            if samples.is_empty() {
                return Err(self.exception(py, &error));
            }
            self.failed = Some(error);
        }
        let entries = samples.into_iter().map(|sample| self.entry(py, sample)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, entries)
    }

    fn entry<'py>(&mut self, py: Python<'py>, sample: Sample<CoreBuffer>) -> PyResult<Entry<'py>> {
        let Sample { begin, end, key, members } = sample;
        let key = decoded(py, &key)?;
        let members = match members {
            Ok(members) => members,
            Err(error) => {
                return Ok((begin, end, key, self.exception(py, &error).into_value(py).into_bound(py).into_any()));
            }
        };
        let dict = PyDict::new(py);
        dict.set_item(intern!(py, "__key__"), &key)?;
        dict.set_item(intern!(py, "__url__"), &self.url)?;
        for Member { extension, body } in members {
            dict.set_item(self.extensions.get(py, &extension)?, Bound::new(py, Buffer::from(body))?)?;
        }
        Ok((begin, end, key, dict.into_any()))
    }

    fn exception(&self, py: Python<'_>, error: &TarError) -> PyErr {
        tar_exception(py, &self.url.bind(py).to_string_lossy(), error)
    }
}

/// Finds the positions of the members of a tar shard, for an index, by reading ranges with its headers.
///
/// The bodies of large members are skipped. Samples and formats are those of `TarReader`; the shard must not be compressed,
/// and its names must be UTF-8.
///
/// Args:
///     url: URL of the shard, for messages.
///     size: Size of the shard in bytes.
///
/// Example:
///     >>> import io, tarfile
///     >>> file = io.BytesIO()
///     >>> with tarfile.open(fileobj=file, mode="w") as tar:
///     ...     tar.addfile(tarfile.TarInfo("images/001.txt"))
///     >>> shard = file.getvalue()
///     >>> indexer = TarIndexer("s3://bucket/shard.tar", len(shard))
///     >>> while part := indexer.next():
///     ...     indexer.feed(Buffer(shard[part[0] : part[1]]))
///     >>> indexer.samples()
///     [('images/001', 0, 512, [('txt', 512, 0)])]
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct TarIndexer {
    url: String,
    walk: Walk,
    extensions: Extensions,
}

/// Extension, offset, size.
type Found<'py> = (Bound<'py, PyString>, u64, u64);

#[pymethods]
impl TarIndexer {
    #[new]
    fn new(url: String, size: u64) -> Self {
        Self { url, walk: Walk::new(size), extensions: Extensions::default() }
    }

    /// Returns the range of the shard to read next, or None after the last member.
    ///
    /// Returns:
    ///     Offset of the first byte, and offset after the last one.
    ///
    /// Raises:
    ///     TarError: The shard is empty or ends in the middle; or as `feed`.
    fn next(&mut self, py: Python<'_>) -> PyResult<Option<(u64, u64)>> {
        let next = self.walk.next_range().map_err(|error| tar_exception(py, &self.url, &error))?;
        Ok(next.map(|range| (range.start, range.end)))
    }

    /// Continues with the bytes of the range that `next` returned.
    ///
    /// Args:
    ///     data: The bytes: a `Buffer`, or an `ObjectReader` of bytes in memory.
    ///
    /// Raises:
    ///     TarError: The bytes are not a tar, a header is damaged, a member is sparse or ends after the shard, a name is
    ///         longer than 64 KiB or not UTF-8, or an extension occurs twice in a sample. `samples` returns those before it.
    ///     ConfigError: `data` is not as long as the range.
    fn feed<'py>(&mut self, py: Python<'py>, data: Data<'py>) -> PyResult<()> {
        let Self { url, walk, .. } = self;
        let raise = |error| tar_exception(py, url, &error);
        let buffer = data.buffer(py)?;
        let shared: SharedBuffer = Buffer::shared(&buffer)?;
        let range = walk.next_range().map_err(raise)?.unwrap_or(0..0);
        let (length, expected) = (shared.as_slice().len(), range.end - range.start);
        if length as u64 != expected {
            return Err(invalid(format!(
                "{length} bytes for the {expected} bytes {}..{} of {url}",
                range.start, range.end
            )));
        }
        py.detach(|| walk.feed(shared.as_slice())).map_err(raise)
    }

    /// Returns the samples that are complete, once.
    ///
    /// Returns:
    ///     Key, offset of the first header, offset after the last member, and extension, offset and size in bytes of each
    ///     member.
    #[expect(clippy::type_complexity, reason = "the rows of an index")]
    fn samples<'py>(&mut self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyString>, u64, u64, Vec<Found<'py>>)>> {
        let Self { walk, extensions, url } = self;
        let rows = walk.samples().map(|Sample { begin, end, key, members }| {
            let members = members.map_err(|error| tar_exception(py, url, &error))?;
            let found = members.into_iter().map(|Member { extension, body: Position { offset, size } }| {
                Ok((extensions.get(py, &extension)?, offset, size))
            });
            Ok((decoded(py, &key)?, begin, end, found.collect::<PyResult<_>>()?))
        });
        rows.collect()
    }

    fn __repr__(&self) -> String {
        format!("<torchobj._torchobj.TarIndexer {}>", self.url)
    }
}
