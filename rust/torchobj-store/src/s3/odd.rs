//! The body of an object that is chunked, or that ends with its connection. It must end where the object does.

use bytes::{Buf, Bytes};
use torchobj_core::buffer::Dest;

use crate::http::{Failure, Lease, OddBody};

/// A body without a length of its own.
pub(super) struct Odd {
    lease: Lease,
    /// `None` once it has ended.
    body: Option<OddBody>,
    /// What it must have.
    length: u64,
    received: u64,
    /// What was received and not handed on. The last bytes are handed on when the body has ended behind them.
    left: Bytes,
    announced: bool,
}

impl Odd {
    /// A body that must have `length` bytes. A body that breaks off is not complete; where its length was not
    /// `announced`, it is not what was asked for.
    pub(super) fn new(lease: Lease, body: OddBody, length: u64, announced: bool) -> Self {
        Self { lease, body: Some(body), length, received: 0, left: Bytes::new(), announced }
    }

    /// Receives the body into `dest`, as [`torchobj_core::store::Opened::read_into`] does; or says what is wrong with it.
    pub(super) async fn read_into(&mut self, dest: &mut Dest) -> Result<Option<String>, Failure> {
        loop {
            if self.received < self.length || self.body.is_none() {
                self.left.advance(dest.fill(&self.left));
                if dest.remaining() == 0 || self.body.is_none() {
                    return Ok(None);
                }
            }
            let Some(body) = &mut self.body else { return Ok(None) };
            match body.next().await? {
                Some(bytes) => {
                    self.received += bytes.len() as u64;
                    if self.received > self.length {
                        return Ok(Some(format!("expected {} bytes, the body has more", self.length)));
                    }
                    // Only an empty frame comes behind the last bytes.
                    if !bytes.is_empty() {
                        self.left = bytes;
                    }
                }
                None => {
                    if let Some(body) = self.body.take() {
                        self.lease.give_back(body);
                    }
                    if self.received < self.length && !self.announced {
                        return Ok(Some(format!(
                            "expected {} bytes, the body ended after {}",
                            self.length, self.received
                        )));
                    }
                }
            }
        }
    }
}
