//! Where the bytes of a read go: allocation of memory once the length is known, and the sinks that receive bodies.

use std::io;

use crate::buffer::{Dest, Memory, ReceivedBytes};
use crate::error::Result;
use crate::store::GetResult;

/// Allocates the memory of a read once its length is known.
pub trait Allocate: Send {
    /// Returned to the caller of the read, together with the bytes.
    type Handle: Send;

    /// Memory for at least `length` bytes.
    ///
    /// # Errors
    /// `InvalidInput` if the caller's memory is too small; other kinds if no memory is available.
    fn allocate(self, length: usize) -> io::Result<(Memory, Self::Handle)>;
}

/// The caller's own memory, or new memory.
impl Allocate for Option<Memory> {
    type Handle = ();

    fn allocate(self, length: usize) -> io::Result<(Memory, ())> {
        match self {
            None => Ok((Memory::allocate(length)?, ())),
            Some(memory) if memory.len() < length => {
                let message = format!("the buffer of {} bytes is too small for {length}", memory.len());
                Err(io::Error::new(io::ErrorKind::InvalidInput, message))
            }
            Some(memory) => Ok((memory, ())),
        }
    }
}

/// Receives the bytes of one range, in order. If a body ends early, the next one continues after the last byte
/// received.
pub trait Sink: Send + 'static {
    /// Number of bytes received.
    fn filled(&self) -> usize;

    /// Number of bytes missing.
    fn remaining(&self) -> usize;

    /// Counts the bytes that it receives from now on.
    fn progress(&mut self) -> ReceivedBytes;

    /// Whether received bytes can be discarded.
    const REWINDS: bool;

    /// Discards the bytes after the first `filled`.
    fn rewind(&mut self, filled: usize);

    /// Receives the body of a response until it ends or no byte is missing.
    fn receive(&mut self, result: &mut dyn GetResult) -> impl Future<Output = Result<()>> + Send;
}

impl Sink for Dest {
    fn filled(&self) -> usize {
        self.filled()
    }

    fn remaining(&self) -> usize {
        self.remaining()
    }

    fn progress(&mut self) -> ReceivedBytes {
        let progress = ReceivedBytes::default();
        self.count_in(&progress);
        progress
    }

    const REWINDS: bool = true;

    fn rewind(&mut self, filled: usize) {
        self.rewind(filled);
    }

    async fn receive(&mut self, result: &mut dyn GetResult) -> Result<()> {
        result.read_into(self).await
    }
}
