//! Transfers of files and folders, for `torchobj.files`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::error::Error;
use torchobj_core::files::special::SpecialFile;
use torchobj_core::files::{Counters, Download, FileState, Folder, Transferred, TreeOptions, TreeResult, UploadFile};
use torchobj_core::list::Filter;
use torchobj_core::types::Version;

use crate::attributes::Attributes;
use crate::error::{OrRaise, exception};
use crate::store::{NativeStore, put_options};
use crate::wait::wait_reporting;

/// Device, inode, size in bytes, and time of modification in nanoseconds since 1970.
type State = (u64, u64, u64, i64);

/// Size in bytes, version, whether the transfer was skipped, and otherwise the file as it was read or written.
type Done = (u64, Option<String>, bool, Option<State>);

/// Number of files that were transferred and that were skipped, number of bytes, the failures, and the relative paths,
/// versions and states of the files that were transferred.
type TreeDone<'py> = (u64, u64, u64, Bound<'py, PyList>, Vec<(String, Option<String>, Option<State>)>);

/// Runs the transfer of one file, or of a tree. Calls `progress` with its counters meanwhile, the last time at its end.
fn run<'py, T: Send + 'static, F>(
    py: Python<'py>,
    progress: Option<&Bound<'py, PyAny>>,
    transfer: impl FnOnce(Arc<Counters>) -> F,
) -> PyResult<T>
where
    F: Future<Output = Result<T, Error>> + Send + 'static,
{
    let counters = Arc::new(Counters::default());
    let report = || -> PyResult<()> {
        let Some(progress) = progress else { return Ok(()) };
        let now = counters.snapshot();
        progress.call1((now.files_done, now.files_total, now.bytes_done, now.bytes_total, now.skipped))?;
        Ok(())
    };
    let result = wait_reporting(py, transfer(counters.clone()), |_| report())?.or_raise(py)?;
    report()?;
    Ok(result)
}

fn done(transferred: Transferred) -> Done {
    let version = transferred.version.map(|version| version.as_str().to_owned());
    (transferred.size, version, transferred.skipped, transferred.file.map(state))
}

fn state(file: FileState) -> State {
    (file.device, file.inode, file.size, file.mtime_ns)
}

fn tree_done<'py>(py: Python<'py>, result: TreeResult) -> PyResult<TreeDone<'py>> {
    let failures = PyList::empty(py);
    for (name, error) in result.failures {
        failures.append((name, exception(py, &error).into_value(py)))?;
    }
    let files = result.done.into_iter().map(|(name, transferred)| {
        let (_, version, _, state) = done(transferred);
        (name, version, state)
    });
    Ok((result.transferred, result.skipped, result.bytes, failures, files.collect()))
}

/// Uploads a file.
///
/// Args:
///     store: The store of the object.
///     path: The file.
///     key: Key of the object.
///     attributes: Headers and metadata of the object.
///     overwrite: Whether an existing object may be replaced.
///     if_version: The version that is replaced.
///     skip_unchanged: Whether an object that is equal to the file is kept.
///     progress: Called about every 0.1 s with the files done, all files, the bytes done, all bytes, and the files that
///         were skipped; totals are None until they are known.
///
/// Returns:
///     Size in bytes, version, whether the upload was skipped, and otherwise device, inode, size in bytes and time of
///     modification in nanoseconds since 1970 of the file as it was read.
///
/// Raises:
///     StoreError: The file could not be read, or the object could not be written.
#[pyfunction]
#[pyo3(signature = (store, path, key, attributes, overwrite, if_version, skip_unchanged, progress=None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn upload_file<'py>(
    py: Python<'py>,
    store: &NativeStore,
    path: PathBuf,
    key: String,
    attributes: Attributes,
    overwrite: bool,
    if_version: Option<String>,
    skip_unchanged: bool,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Done> {
    let client = store.client(py)?;
    let options = put_options(attributes, overwrite, if_version);
    let upload = UploadFile { path, key, options, skip_unchanged };
    run(py, progress.as_ref(), |counters| async move { client.upload_one(upload, &counters).await }).map(done)
}

/// Downloads an object to a file.
///
/// Args:
///     store: The store of the object.
///     key: Key of the object.
///     folder: The folder of the file.
///     name: Name of the file.
///     version: The version to read; None: the current one.
///     skip_unchanged: Whether a file that is equal to the object is kept.
///     progress: As for `upload_file`.
///
/// Returns:
///     As `upload_file`, with the file as it was written.
///
/// Raises:
///     StoreError: The object could not be read, or the file could not be written.
#[pyfunction]
#[pyo3(signature = (store, key, folder, name, version, skip_unchanged, progress=None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn download_file<'py>(
    py: Python<'py>,
    store: &NativeStore,
    key: String,
    folder: PathBuf,
    name: String,
    version: Option<String>,
    skip_unchanged: bool,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Done> {
    let client = store.client(py)?;
    let download = Download { key, listed: None, version: version.map(Version::selected), skip_unchanged };
    run(py, progress.as_ref(), |counters| async move { client.download_one(download, &folder, &name, &counters).await })
        .map(done)
}

/// Uploads the files below a folder.
///
/// Args:
///     store: The store of the objects.
///     folder: The folder.
///     prefix: Prefix of the keys.
///     glob: Selects files by their relative paths.
///     patterns: Whether relative paths that match a pattern of a shell are selected; the last one that matches counts.
///     attributes: Headers and metadata of the objects.
///     content_types: Content types by the ends of names, in lower case, for attributes without one.
///     overwrite: Whether existing objects may be replaced.
///     skip_unchanged: Whether objects that are equal to their files are kept.
///     lists_done: Whether the result contains each file that was transferred.
///     progress: As for `upload_file`.
///
/// Returns:
///     Number of files that were transferred and that were skipped, number of bytes, the relative paths and exceptions
///     of the files that failed, and with `lists_done` the relative paths, versions and states of those transferred.
///
/// Raises:
///     ConfigError: `glob` is not valid.
///     StoreError: The folder could not be read.
#[pyfunction]
#[pyo3(signature = (store, folder, prefix, glob, patterns, attributes, content_types, overwrite, skip_unchanged, lists_done, progress=None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn upload_tree<'py>(
    py: Python<'py>,
    store: &NativeStore,
    folder: PathBuf,
    prefix: String,
    glob: Option<&str>,
    patterns: Vec<(bool, String)>,
    attributes: Attributes,
    content_types: HashMap<String, String>,
    overwrite: bool,
    skip_unchanged: bool,
    lists_done: bool,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<TreeDone<'py>> {
    let client = store.client(py)?;
    let filter = Filter::new(glob, Vec::new(), None).or_raise(py)?.with_patterns(patterns);
    let put = put_options(attributes, overwrite, None);
    let options = TreeOptions { filter, put, content_types, skip_unchanged, lists_done };
    let result = run(py, progress.as_ref(), |counters| async move {
        client.upload_tree(&folder, &prefix, options, &counters).await
    })?;
    tree_done(py, result)
}

/// Downloads the objects under a prefix.
///
/// Args:
///     store: The store of the objects.
///     prefix: Prefix of the keys.
///     folder: The folder of the files.
///     glob: Selects objects by their keys without the prefix.
///     patterns: As for `upload_tree`.
///     skip_unchanged: Whether files that are equal to their objects are kept.
///     lists_done: As for `upload_tree`.
///     progress: As for `upload_file`.
///
/// Returns:
///     Number of files that were transferred and that were skipped, number of bytes, the relative paths and exceptions
///     of the files that failed, and with `lists_done` the relative paths, versions and states of those transferred.
///
/// Raises:
///     ConfigError: `glob` is not valid.
///     StoreError: The listing failed, or the folder could not be opened.
#[pyfunction]
#[pyo3(signature = (store, prefix, folder, glob, patterns, skip_unchanged, lists_done, progress=None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn download_tree<'py>(
    py: Python<'py>,
    store: &NativeStore,
    prefix: String,
    folder: PathBuf,
    glob: Option<&str>,
    patterns: Vec<(bool, String)>,
    skip_unchanged: bool,
    lists_done: bool,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<TreeDone<'py>> {
    let client = store.client(py)?;
    let filter = Filter::new(glob, Vec::new(), None).or_raise(py)?.with_patterns(patterns);
    let options = TreeOptions { filter, skip_unchanged, lists_done, ..TreeOptions::default() };
    let folder = Folder::open(&folder).or_raise(py)?;
    let result = run(py, progress.as_ref(), |counters| async move {
        client.download_tree(&prefix, folder, options, &counters).await
    })?;
    tree_done(py, result)
}

/// Returns whether a write opens the file instead of replacing it: a device, a FIFO, a socket, or a descriptor.
///
/// Args:
///     path: The file. Symbolic links are followed.
#[pyfunction]
pub(crate) fn is_special_file(py: Python<'_>, path: PathBuf) -> bool {
    py.detach(|| SpecialFile::find(&path).is_some())
}
