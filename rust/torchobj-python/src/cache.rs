//! The files of a disk cache, for the command line.

use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use torchobj_core::cache::{CacheEntry, CacheFolder};

use crate::error::OrRaise;

/// The URL of an object, the start and the end of the bytes that a file has, and the size of the object.
type Object = (String, u64, u64, u64);

/// The object, or `None` if the file is damaged; bytes on the disk, seconds of the last read since 1970, and whether it is intact.
type File = (Option<Object>, u64, i64, bool);

/// Iterator over the files of a disk cache: object, bytes on the disk, time of the last read in seconds since 1970, and whether the
/// file is intact. The object is a tuple of URL, start, end and size, or None if the file is damaged.
///
/// Args:
///     folder: The folder of the cache.
///     verify: Whether all bytes are compared with their checksums, instead of those at the end.
///
/// Raises:
///     ConfigError: Other users may write to the folder, or it belongs to one.
///     ObjectNotFoundError: It contains no cache.
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct CacheFiles {
    entries: torchobj_core::cache::CacheEntries,
    verify: bool,
    last: Option<CacheEntry>,
}

#[pymethods]
impl CacheFiles {
    #[new]
    #[pyo3(signature = (folder, verify=false))]
    #[expect(clippy::needless_pass_by_value, reason = "an argument of Python")]
    fn new(py: Python<'_>, folder: PathBuf, verify: bool) -> PyResult<Self> {
        Ok(Self { entries: CacheFolder::open(&folder).or_raise(py)?.entries()?, verify, last: None })
    }

    /// Returns the accounted bytes of all files; None if they are not counted yet.
    fn used_bytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(py.detach(|| self.entries.used_bytes())?)
    }

    /// Returns the paths of the files of other programs that were found so far.
    fn others(&self) -> Vec<PathBuf> {
        self.entries.others().to_vec()
    }

    /// Deletes what killed processes left, and counts the files.
    fn correct(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.entries.correct())?)
    }

    /// Counts the files, and deletes those that were read longest ago.
    ///
    /// Args:
    ///     max_bytes: The others have at most this many bytes.
    ///
    /// Returns:
    ///     Number of the deleted files, and their bytes on the disk.
    fn evict(&self, py: Python<'_>, max_bytes: u64) -> PyResult<(u64, u64)> {
        let evicted = py.detach(|| self.entries.evict(max_bytes))?;
        Ok((evicted.files, evicted.disk_bytes))
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<File>> {
        let (entries, verify) = (&mut self.entries, self.verify);
        let found = py.detach(|| {
            while let Some(entry) = entries.next().transpose()? {
                let intact = if verify { entries.is_intact(&entry)? } else { Some(entry.object.is_some()) };
                if let Some(intact) = intact {
                    return std::io::Result::Ok(Some((entry, intact)));
                }
            }
            Ok(None)
        })?;
        let Some((entry, intact)) = found else { return Ok(None) };
        let shown = (entry.object.clone(), entry.disk_bytes, entry.read_s, intact);
        self.last = Some(entry);
        Ok(Some(shown))
    }

    /// Deletes the file that was returned last.
    fn remove(&mut self, py: Python<'_>) -> PyResult<()> {
        let entry = self.last.take().ok_or_else(|| PyValueError::new_err("no file was returned"))?;
        Ok(py.detach(|| self.entries.remove(&entry))?)
    }
}
