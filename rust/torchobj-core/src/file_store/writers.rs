//! The writers of uploads to special files that have begun, by the ids of the uploads.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::files::special::SpecialWriter;

/// The writers of one store. A writer is taken while a part is written, and does not come back if that fails.
#[derive(Debug, Default)]
pub(super) struct Writers(Mutex<HashMap<String, SpecialWriter>>);

impl Writers {
    pub(super) fn put(&self, id: &str, writer: SpecialWriter) {
        self.0.lock().expect("no holder of this lock panics").insert(id.to_owned(), writer);
    }

    /// Takes the writer of an upload; `None` if it has ended, or a part failed.
    pub(super) fn take(&self, id: &str) -> Option<SpecialWriter> {
        self.0.lock().expect("no holder of this lock panics").remove(id)
    }
}
