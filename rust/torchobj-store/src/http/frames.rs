//! The body of an object that arrives in frames: chunked, ended by the connection, or from an SDK. It must end where the
//! object does.

use std::io;

use bytes::{Buf, Bytes};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use torchobj_core::buffer::Dest;

use super::{Failure, Lease, OddBody};

/// Where frames come from.
enum Source {
    /// Our own connection, which is given back to its pool when the body has ended.
    Connection(Box<(Lease, OddBody)>),
    Stream(BoxStream<'static, io::Result<Bytes>>),
    Ended,
}

/// A body of which the length is known from elsewhere.
pub(super) struct Frames {
    source: Source,
    /// Expected length in bytes.
    length: u64,
    received: u64,
    /// Received and not yet in a destination. The last bytes are passed on only after the body has ended behind them.
    left: Bytes,
    announced: bool,
}

impl Frames {
    /// The body of the response to GET of `lease`, which must have `length` bytes. A body that breaks off is incomplete;
    /// where the response did not announce its length, it is not the object.
    pub(super) async fn of_response(mut lease: Lease, length: u64, announced: bool) -> Result<Self, Failure> {
        let body = lease.stream("GET").await?;
        Ok(Self {
            source: Source::Connection(Box::new((lease, body))),
            length,
            received: 0,
            left: Bytes::new(),
            announced,
        })
    }

    /// The frames of a response that announced `length` bytes.
    pub(super) fn of_stream(stream: BoxStream<'static, io::Result<Bytes>>, length: u64) -> Self {
        Self { source: Source::Stream(stream), length, received: 0, left: Bytes::new(), announced: true }
    }

    /// Receives the body into `dest`, as [`torchobj_core::store::Opened::read_into`] does. Returns what is wrong with a
    /// body of another length.
    pub(super) async fn read_into(&mut self, dest: &mut Dest) -> Result<Option<String>, Failure> {
        loop {
            let ended = matches!(self.source, Source::Ended);
            if self.received < self.length || ended {
                self.left.advance(dest.fill(&self.left));
                if dest.remaining() == 0 || ended {
                    return Ok(None);
                }
            }
            match self.next().await? {
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
                None if self.received < self.length && !self.announced => {
                    return Ok(Some(format!("expected {} bytes, the body ended after {}", self.length, self.received)));
                }
                None => {}
            }
        }
    }

    /// The next frame; `None` where the body ends.
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        let frame = match &mut self.source {
            Source::Connection(connection) => connection.1.next().await?,
            Source::Stream(stream) => {
                let frame = stream.next().await.transpose();
                frame.map_err(|error| Failure::broken("the connection broke in the body", error))?
            }
            Source::Ended => None,
        };
        if frame.is_none()
            && let Source::Connection(connection) = std::mem::replace(&mut self.source, Source::Ended)
        {
            let (mut lease, body) = *connection;
            lease.give_back(body);
        }
        Ok(frame)
    }
}
