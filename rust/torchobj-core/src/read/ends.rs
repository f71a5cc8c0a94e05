//! Reads the head and the tail of an object at once: where its index lies, before anything is known of it.

use std::sync::Arc;

use super::fetch::Read;
use crate::buffer::Buffer;
use crate::client::Client;
use crate::error::{ErrorKind, Operation, Result};
use crate::types::{ByteRange, Version};

/// The two ends of an object.
#[derive(Debug)]
pub struct Ends {
    /// Its first bytes.
    pub head: Buffer,
    /// Its last bytes; those of a small object are its first too.
    pub tail: Buffer,
    /// Size of the whole object.
    pub size: u64,
    /// The version of both.
    pub version: Option<Version>,
}

impl Client {
    /// Reads the first `head_bytes` and the last `tail_bytes` of an object, or what it has of them, in parallel.
    ///
    /// # Errors
    /// `Config` when one of them is 0, `Changed` when the object was replaced in between, and those of [`Client::get`].
    pub async fn get_ends(self: &Arc<Self>, key: &str, head_bytes: u64, tail_bytes: u64) -> Result<Ends> {
        if head_bytes == 0 || tail_bytes == 0 {
            let message = format!("head_bytes={head_bytes}, tail_bytes={tail_bytes}: must be 1 or more");
            return Err(self.store().error(ErrorKind::Config, Operation::Get, key, &message));
        }
        let read = |range| self.get(Read { range: Some(range), ..Read::whole(key) });
        let head = async {
            match read(ByteRange::Bounded(0..head_bytes)).await {
                // Every range of an empty object is refused, and `get` of its tail, or of all of it, is nothing.
                Err(error) if error.kind() == ErrorKind::Range => self.get(Read::whole(key)).await,
                head => head,
            }
        };
        let (head, tail) = tokio::try_join!(head, read(ByteRange::Suffix(tail_bytes)))?;
        if (head.size, &head.version) != (tail.size, &tail.version) {
            let message = "the object was replaced between its head and its tail";
            return Err(self.store().error(ErrorKind::Changed, Operation::Get, key, message));
        }
        let (size, mut version) = (head.size, head.version);
        if size == 0 {
            let now = self.head(key).await?;
            if now.size != 0 {
                let message = "the object was replaced after its ends were read";
                return Err(self.store().error(ErrorKind::Changed, Operation::Get, key, message));
            }
            version = now.version;
        }
        Ok(Ends { head: head.buffer, tail: tail.buffer, size, version })
    }
}
