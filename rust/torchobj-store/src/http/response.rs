//! A response that is a success: its head has been received, its body has not.

use super::{Framing, Lease};

/// The head of a response, and the connection that its body comes over.
pub(crate) struct Response {
    pub(crate) lease: Lease,
    pub(crate) status: u16,
}

impl Response {
    /// The value of a header; the case of `name` does not matter.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.lease.header(name)
    }

    /// Length of the body in bytes, where the response announces it.
    pub(crate) fn length(&self) -> Option<u64> {
        match self.lease.answer().framing() {
            Framing::Length(length) => Some(length),
            Framing::Empty | Framing::Odd => None,
        }
    }
}
