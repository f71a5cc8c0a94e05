//! Values that are only used and dropped in the process that made them. A forked child leaks its copy. The handlers of the
//! fork itself are in the parent module.

use super::generation;

/// A value of one process, such as connections, tasks or locks. A forked child can neither use nor drop its copy, and leaks
/// it.
#[derive(Debug)]
pub struct Local<T> {
    process: u64,
    /// `None` after `take`.
    value: Option<T>,
}

impl<T> Local<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        Self { process: generation(), value: Some(value) }
    }

    /// Returns the value in `slot`. Calls `make` if the slot is empty or holds a value of the parent process.
    pub fn in_slot(slot: &mut Option<Self>, make: impl FnOnce() -> T) -> &mut T {
        if slot.as_ref().and_then(Self::get).is_none() {
            *slot = Some(Self::new(make()));
        }
        slot.as_mut().and_then(Self::get_mut).expect("filled in just above")
    }

    /// The value; `None` in a forked child.
    pub fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.is_own())
    }

    /// The value, mutably; `None` in a forked child.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        let is_own = self.is_own();
        self.value.as_mut().filter(|_| is_own)
    }

    /// The value, without a check of the process: for values that only tasks of their own process can reach.
    ///
    /// # Panics
    /// If the value was taken.
    pub fn own(&self) -> &T {
        self.value.as_ref().expect("the value was not taken")
    }

    /// The value, mutably and without a check of the process.
    ///
    /// # Panics
    /// If the value was taken.
    pub fn own_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("the value was not taken")
    }

    /// Takes the value; `None` in a forked child, or if it was taken before.
    pub fn take(&mut self) -> Option<T> {
        if self.is_own() { self.value.take() } else { None }
    }

    fn is_own(&self) -> bool {
        self.process == generation()
    }
}

impl<T> Drop for Local<T> {
    fn drop(&mut self) {
        if !self.is_own() {
            std::mem::forget(self.value.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    /// A value as in a forked child.
    fn inherited<T>(value: T) -> Local<T> {
        Local { process: generation() + 1, value: Some(value) }
    }

    #[test]
    fn a_value_is_used_taken_and_dropped_in_its_process() {
        let value = Rc::new(());
        let mut local = Local::new(value.clone());
        assert!(local.get().is_some() && local.get_mut().is_some());
        drop(local.take());
        assert!(local.get().is_none() && local.take().is_none());
        drop(Local::new(value.clone()));
        assert_eq!(Rc::strong_count(&value), 1);
    }

    #[test]
    fn a_child_neither_uses_nor_drops_a_value_of_its_parent() {
        let value = Rc::new(());
        let mut local = inherited(value.clone());
        assert!(local.get().is_none() && local.get_mut().is_none() && local.take().is_none());
        drop(local);
        assert_eq!(Rc::strong_count(&value), 2, "the child's copy is leaked");
    }

    #[test]
    fn a_slot_is_filled_once_per_process() {
        let mut slot = None;
        *Local::in_slot(&mut slot, || 1) += 1;
        assert_eq!(*Local::in_slot(&mut slot, || 7), 2);
        let parents = Rc::new(());
        let mut slot = Some(inherited(parents.clone()));
        Local::in_slot(&mut slot, || Rc::new(()));
        assert!(slot.is_some_and(|local| local.get().is_some()));
        assert_eq!(Rc::strong_count(&parents), 2, "the parent's value is leaked");
    }
}
