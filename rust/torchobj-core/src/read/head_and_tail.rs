//! Reads the head and the tail of an object in parallel. Formats with an index at one end need no other request for it.

use std::sync::Arc;

use super::fetch::ReadRequest;
use crate::buffer::Buffer;
use crate::client::Client;
use crate::error::{ErrorKind, Operation, Result};
use crate::types::{ByteRange, Version};

/// The head and the tail of an object.
#[derive(Debug)]
pub struct HeadAndTail {
    /// First bytes.
    pub head: Buffer,
    /// Last bytes; they overlap the head if the object is small.
    pub tail: Buffer,
    /// Size of the whole object.
    pub size: u64,
    /// Version of both.
    pub version: Option<Version>,
}

impl Client {
    /// Reads the first `head_bytes` and the last `tail_bytes` of an object, in parallel. Returns less of a smaller
    /// object.
    ///
    /// # Errors
    /// `Config` if one of them is 0, `Changed` if the object was replaced between the requests, and errors of
    /// [`Client::get`].
    pub async fn get_head_and_tail(
        self: &Arc<Self>,
        key: &str,
        head_bytes: u64,
        tail_bytes: u64,
    ) -> Result<HeadAndTail> {
        if head_bytes == 0 || tail_bytes == 0 {
            let message = format!("head_bytes={head_bytes}, tail_bytes={tail_bytes}: must be 1 or more");
            return Err(self.store().error(ErrorKind::Config, Operation::Get, key, &message));
        }
        let read = |range| self.get(ReadRequest { range: Some(range), ..ReadRequest::whole(key) });
        let head = async {
            match read(ByteRange::Bounded(0..head_bytes)).await {
                // Every range of an empty object is refused; its tail, or the whole object, can be read.
                Err(error) if error.kind() == ErrorKind::Range => self.get(ReadRequest::whole(key)).await,
                head => head,
            }
        };
        let (head, tail) = tokio::try_join!(head, read(ByteRange::Suffix(tail_bytes)))?;
        if head.size != tail.size || head.version != tail.version {
            let message = "the object was replaced between its head and its tail";
            return Err(self.store().error(ErrorKind::Changed, Operation::Get, key, message));
        }
        Ok(HeadAndTail { size: head.size, version: head.version, head: head.buffer, tail: tail.buffer })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;
    use crate::faulty_store::{Fault, FaultyStore};
    use crate::memory::MemoryStore;
    use crate::policy::Policy;
    use crate::types::PutOptions;

    async fn client(body: &'static [u8]) -> (Arc<Client>, Arc<FaultyStore>) {
        let faulty = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(format!("ends-{}", fastrand::u64(..))))));
        let client = Arc::new(Client::new(faulty.clone(), Policy::default()));
        put(&client, body).await;
        (client, faulty)
    }

    async fn put(client: &Arc<Client>, body: &'static [u8]) {
        client.put("k", Bytes::from_static(body).into(), &PutOptions::default()).await.unwrap();
    }

    #[tokio::test]
    async fn an_object_smaller_than_head_and_tail_is_read_twice() {
        for (body, head, tail) in [("head to tail", "head", "tail"), ("all", "all", "all"), ("", "", "")] {
            let (client, _) = client(body.as_bytes()).await;
            let ends = client.get_head_and_tail("k", 4, 4).await.unwrap();
            assert_eq!((ends.head.as_slice(), ends.tail.as_slice()), (head.as_bytes(), tail.as_bytes()));
            assert_eq!((ends.size, ends.version), (body.len() as u64, client.head("k").await.unwrap().version));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_between_the_requests_is_an_error() {
        let (client, faulty) = client(b"one object").await;
        faulty.script(Operation::Get, [Fault::Delay(Duration::ZERO), Fault::Delay(Duration::from_secs(2))]);
        let replace = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            put(&client, b"the other.").await;
        };
        let (ends, ()) = tokio::join!(client.get_head_and_tail("k", 4, 4), replace);
        assert_eq!(ends.unwrap_err().kind(), ErrorKind::Changed);
    }

    #[tokio::test]
    async fn an_empty_head_or_tail_is_refused() {
        let (client, _) = client(b"body").await;
        for (head_bytes, tail_bytes) in [(0, 1), (1, 0)] {
            assert_eq!(
                client.get_head_and_tail("k", head_bytes, tail_bytes).await.unwrap_err().kind(),
                ErrorKind::Config
            );
        }
    }
}
