//! Copies files.

use std::io;
use std::path::Path;

use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::store::ObjectStore;
use torchobj_core::types::{Condition, Version};
use torchobj_core::url::ObjectUrl;

use super::FileStore;
use super::get::open_regular;
use super::put::{TemporaryFile, path_conflict};

impl FileStore {
    pub(super) async fn copy_file(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        let operation = Operation::Copy;
        self.check_key(operation, key)?;
        if source.scheme != "file" {
            let message = format!("cannot copy from {source}: the source must be a file:// URL");
            return Err(self.error(ErrorKind::Unsupported, operation, key, &message));
        }
        let (from, target, config) = (Path::new("/").join(&source.key), self.path(key), self.config);
        let copy = move || {
            let (mut from, _) = open_regular(&from)?;
            let (temporary, mut file) = TemporaryFile::create(&target, &Self::new_id())?;
            io::copy(&mut from, &mut file)?;
            temporary.publish(&file, &target, &Condition::Always, config)
        };
        self.blocking(operation, key, copy).await.map_err(path_conflict)
    }
}
