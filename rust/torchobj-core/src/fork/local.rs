//! Values that live in the process that made them. What becomes of them in a forked child is decided here; how the fork
//! itself is made safe is `super`'s.

use super::generation;

/// Something of this process: connections, tasks, locks. A forked child has a copy that it can neither use nor drop: it
/// leaks it.
#[derive(Debug)]
pub struct Local<T> {
    process: u32,
    /// Taken by `take` only.
    value: Option<T>,
}

impl<T> Local<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        Self { process: generation(), value: Some(value) }
    }

    /// The value in `slot`, made anew where there is none or where it is the parent's.
    pub fn in_slot(slot: &mut Option<Self>, make: impl FnOnce() -> T) -> &mut T {
        if slot.as_ref().and_then(Self::get).is_none() {
            *slot = Some(Self::new(make()));
        }
        slot.as_mut().and_then(Self::get_mut).expect("filled in just above")
    }

    /// The value; `None` in a forked child.
    pub fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.is_here())
    }

    /// The value, to be changed; `None` in a forked child.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        let here = self.is_here();
        self.value.as_mut().filter(|_| here)
    }

    /// The value, without asking the system where this is: for what only tasks of its own process reach.
    ///
    /// # Panics
    /// When it was taken.
    pub fn own(&self) -> &T {
        self.value.as_ref().expect("nobody goes on with what was taken")
    }

    /// The same, to be changed.
    ///
    /// # Panics
    /// When it was taken.
    pub fn own_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("nobody goes on with what was taken")
    }

    /// The value, for its owner to end; `None` in a forked child, and once it was taken.
    pub fn take(&mut self) -> Option<T> {
        if self.is_here() { self.value.take() } else { None }
    }

    fn is_here(&self) -> bool {
        self.process == generation()
    }
}

impl<T> Drop for Local<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    /// As a forked child has it.
    fn inherited<T>(value: T) -> Local<T> {
        Local { process: generation() + 1, value: Some(value) }
    }

    #[test]
    fn a_value_is_used_taken_and_dropped_where_it_was_made() {
        let value = Rc::new(());
        let mut local = Local::new(value.clone());
        assert!(local.get().is_some() && local.get_mut().is_some());
        drop(local.take());
        assert!(local.get().is_none() && local.take().is_none());
        drop(Local::new(value.clone()));
        assert_eq!(Rc::strong_count(&value), 1);
    }

    #[test]
    fn a_child_neither_uses_nor_drops_what_its_parent_made() {
        let value = Rc::new(());
        let mut local = inherited(value.clone());
        assert!(local.get().is_none() && local.get_mut().is_none() && local.take().is_none());
        drop(local);
        assert_eq!(Rc::strong_count(&value), 2, "the child's copy is leaked");
    }

    #[test]
    fn a_slot_is_filled_once_in_a_process_and_anew_in_its_child() {
        let mut slot = None;
        *Local::in_slot(&mut slot, || 1) += 1;
        assert_eq!(*Local::in_slot(&mut slot, || 7), 2);
        let parents = Rc::new(());
        let mut slot = Some(inherited(parents.clone()));
        Local::in_slot(&mut slot, || Rc::new(()));
        assert!(slot.is_some_and(|local| local.get().is_some()));
        assert_eq!(Rc::strong_count(&parents), 2, "the parent's is leaked");
    }
}
