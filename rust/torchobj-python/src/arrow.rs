//! Exports listings as Arrow record batches, by the Arrow PyCapsule interface.

use std::io;
use std::sync::Arc;

use arrow_array::builder::{
    ArrayBuilder, MapBuilder, StringBuilder, StringDictionaryBuilder, TimestampMillisecondBuilder, UInt64Builder,
};
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::types::Int32Type;
use arrow_array::{ArrayRef, RecordBatch, RecordBatchIterator};
use arrow_schema::ArrowError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use torchobj_core::types::{ListEntry, ObjectHead};

/// Minimum number of rows of a batch that is not the last. Readers of Arrow are slow with small batches.
const MIN_ROWS: usize = 16 << 10;

/// The columns of a batch that is being built.
pub(crate) struct Columns {
    key: StringBuilder,
    size: UInt64Builder,
    version: StringBuilder,
    last_modified: TimestampMillisecondBuilder,
    storage_class: StringDictionaryBuilder<Int32Type>,
    attributes: Option<AttributeColumns>,
}

struct AttributeColumns {
    content_type: StringBuilder,
    metadata: MapBuilder<StringBuilder, StringBuilder>,
}

impl Columns {
    /// Columns of listed objects; `with_attributes` adds those of HEAD responses.
    fn new(with_attributes: bool) -> Self {
        Self {
            key: StringBuilder::new(),
            size: UInt64Builder::new(),
            version: StringBuilder::new(),
            last_modified: TimestampMillisecondBuilder::new().with_timezone("UTC"),
            storage_class: StringDictionaryBuilder::new(),
            attributes: with_attributes.then(|| AttributeColumns {
                content_type: StringBuilder::new(),
                metadata: MapBuilder::new(None, StringBuilder::new(), StringBuilder::new()),
            }),
        }
    }

    /// Appends an object of a listing.
    pub(crate) fn push(&mut self, entry: &ListEntry) {
        self.key.append_value(&entry.key);
        self.size.append_option(entry.size);
        self.version.append_option(entry.version.as_ref().map(|version| version.as_str()));
        self.last_modified.append_option(entry.modified_ms);
        self.storage_class.append_option(entry.storage_class.as_deref());
    }

    /// Appends the response to a HEAD request.
    pub(crate) fn push_head(&mut self, key: &str, head: &ObjectHead) {
        self.key.append_value(key);
        self.size.append_value(head.size);
        self.version.append_option(head.version.as_ref().map(|version| version.as_str()));
        self.last_modified.append_option(head.modified_ms);
        self.storage_class.append_option(head.attributes.storage_class.as_deref());
        if let Some(columns) = &mut self.attributes {
            columns.content_type.append_option(head.attributes.content_type.as_deref());
            for (name, value) in &head.attributes.metadata {
                columns.metadata.keys().append_value(name);
                columns.metadata.values().append_value(value);
            }
            columns.metadata.append(true).expect("a name and a value were appended for each entry");
        }
    }

    fn is_full(&self) -> bool {
        self.key.len() >= MIN_ROWS
    }

    /// The batch of the rows so far.
    fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut columns: Vec<(&str, ArrayRef, bool)> = vec![
            ("key", Arc::new(self.key.finish()), false),
            ("size", Arc::new(self.size.finish()), true),
            ("version", Arc::new(self.version.finish()), true),
            ("last_modified", Arc::new(self.last_modified.finish()), true),
            ("storage_class", Arc::new(self.storage_class.finish()), true),
        ];
        if let Some(attributes) = &mut self.attributes {
            columns.push(("content_type", Arc::new(attributes.content_type.finish()), true));
            columns.push(("metadata", Arc::new(attributes.metadata.finish()), false));
        }
        RecordBatch::try_from_iter_with_nullable(columns)
    }
}

/// Appends the next page. Returns whether there was one.
type NextRows = Box<dyn FnMut(Python<'_>, &mut Columns) -> PyResult<bool> + Send>;

/// Exports rows as a capsule of an `ArrowArrayStream`. The consumer may read it on any thread of this process. An error is an
/// `EIO` with its message.
pub(crate) fn stream(py: Python<'_>, with_attributes: bool, mut next: NextRows) -> PyResult<Bound<'_, PyCapsule>> {
    let failed = |error: ArrowError| PyRuntimeError::new_err(error.to_string());
    let schema = Columns::new(with_attributes).finish().map_err(failed)?.schema();
    let mut columns = Columns::new(with_attributes);
    let mut ended = false;
    let batches = std::iter::from_fn(move || {
        while !ended && !columns.is_full() {
            match Python::attach(|py| next(py, &mut columns)) {
                Ok(more) => ended = !more,
                Err(error) => {
                    ended = true;
                    columns = Columns::new(with_attributes);
                    return Some(Err(ArrowError::IoError(error.to_string(), io::Error::other(error))));
                }
            }
        }
        let batch = columns.finish();
        batch.map(|batch| (batch.num_rows() > 0).then_some(batch)).transpose()
    });
    let reader = RecordBatchIterator::new(batches, schema);
    PyCapsule::new_with_value(py, FFI_ArrowArrayStream::new(Box::new(reader)), c"arrow_array_stream")
}
