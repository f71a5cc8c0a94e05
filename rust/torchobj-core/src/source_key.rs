//! How a caller identifies an object of a source. Does no I/O.

use std::sync::Arc;

use crate::object_ref::ObjectRef;

/// Identifies an object of a source of the prefetcher. All keys of a source are of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceKey {
    /// Its index in the manifest of the source.
    Index(u64),
    /// What is read, if the source has no manifest.
    Ref(Arc<ObjectRef>),
}

impl SourceKey {
    /// The keys of objects of a manifest.
    pub fn indices(indices: impl IntoIterator<Item = u64>) -> Vec<Self> {
        indices.into_iter().map(Self::Index).collect()
    }
}

impl From<Arc<ObjectRef>> for SourceKey {
    fn from(object: Arc<ObjectRef>) -> Self {
        Self::Ref(object)
    }
}
