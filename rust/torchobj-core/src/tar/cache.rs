//! What was made of the extensions so far: the same few occur in every sample.

use std::collections::HashMap;

/// Longer extensions are not kept: shards are not trusted, and keys with dots make long ones.
const MAX_BYTES: usize = 64;

/// More extensions are not kept: they differ from sample to sample.
const MAX_EXTENSIONS: usize = 1024;

/// Values by extension, within bounded memory.
#[derive(Debug)]
pub struct ExtensionCache<T>(HashMap<Vec<u8>, T>);

impl<T> ExtensionCache<T> {
    /// The value that was kept for an extension.
    pub fn get(&self, extension: &[u8]) -> Option<&T> {
        self.0.get(extension)
    }

    /// Keeps a value. Has no effect for an extension of more than 64 bytes, and after 1024 others.
    pub fn keep(&mut self, extension: &[u8], value: impl FnOnce() -> T) {
        if extension.len() <= MAX_BYTES && self.0.len() < MAX_EXTENSIONS {
            self.0.insert(extension.to_vec(), value());
        }
    }
}

impl<T> Default for ExtensionCache<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_extensions_are_not_kept() {
        let mut cache = ExtensionCache::default();
        for bytes in [0, 3, 64, 65, 1 << 20] {
            cache.keep(&vec![b'x'; bytes], || bytes);
            assert_eq!(cache.get(&vec![b'x'; bytes]), (bytes <= 64).then_some(&bytes));
        }
    }

    #[test]
    fn at_most_1024_extensions_are_kept() {
        let mut cache = ExtensionCache::default();
        for index in 0..2000 {
            let extension = index.to_string();
            cache.keep(extension.as_bytes(), || index);
            assert_eq!(cache.get(extension.as_bytes()), (index < 1024).then_some(&index));
        }
    }
}
