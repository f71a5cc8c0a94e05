//! Values that live in the process that made them.

use torchobj_core::fork;

/// Something of this process: connections, tasks, locks. A forked child has a copy that it can neither use nor drop.
pub(crate) struct Local<T> {
    process: u32,
    value: Option<T>,
}

impl<T> Local<T> {
    /// A value of this process.
    pub(crate) fn new(value: T) -> Self {
        Self { process: fork::generation(), value: Some(value) }
    }

    /// The value; `None` in a forked child.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.is_here())
    }

    /// The value, to be changed; `None` in a forked child.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        let here = self.is_here();
        self.value.as_mut().filter(|_| here)
    }

    fn is_here(&self) -> bool {
        self.process == fork::generation()
    }
}

impl<T> Drop for Local<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}
