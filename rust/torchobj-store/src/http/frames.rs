//! Receives the body of an object in frames: chunked, ended by the end of the connection, or from an SDK. Verifies its
//! length.

use std::io;

use bytes::{Buf, Bytes};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use torchobj_core::buffer::Dest;

use super::{Failure, Lease};

/// The source of frames.
enum FrameStream {
    /// Our own connection, which is returned to its pool at the end of the body.
    Connection(Lease),
    Stream(BoxStream<'static, io::Result<Bytes>>),
    Ended,
}

/// A body whose expected length is known.
pub(super) struct Frames {
    source: FrameStream,
    /// Expected length in bytes.
    length: u64,
    received: u64,
    /// Received bytes that were not copied to a destination yet. The last bytes are copied only after the end of the body.
    pending: Bytes,
    has_length: bool,
}

impl Frames {
    /// The body of the response to the GET of `lease`, which must have `length` bytes. If the response does not have its
    /// length, a shorter body is an error of the protocol; otherwise it is incomplete.
    pub(super) fn of_response(lease: Lease, length: u64, has_length: bool) -> Self {
        Self { source: FrameStream::Connection(lease), length, received: 0, pending: Bytes::new(), has_length }
    }

    /// The frames of a response with a body of `length` bytes.
    pub(super) fn of_stream(stream: BoxStream<'static, io::Result<Bytes>>, length: u64) -> Self {
        Self { source: FrameStream::Stream(stream), length, received: 0, pending: Bytes::new(), has_length: true }
    }

    /// Receives the body into `dest`, as [`torchobj_core::store::GetResult::read_into`]. Returns an error message if the body
    /// has another length.
    pub(super) async fn read_into(&mut self, dest: &mut Dest) -> Result<Option<String>, Failure> {
        loop {
            let ended = matches!(self.source, FrameStream::Ended);
            if self.received < self.length || ended {
                self.pending.advance(dest.fill(&self.pending));
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
                    // Only an empty frame can follow the last bytes.
                    if !bytes.is_empty() {
                        self.pending = bytes;
                    }
                }
                None if self.received < self.length && !self.has_length => {
                    return Ok(Some(format!("expected {} bytes, the body ended after {}", self.length, self.received)));
                }
                None => {}
            }
        }
    }

    /// The next frame; `None` at the end of the body.
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        let frame = match &mut self.source {
            FrameStream::Connection(lease) => lease.next_frame().await?,
            FrameStream::Stream(stream) => {
                let frame = stream.next().await.transpose();
                frame.map_err(|error| Failure::broken("the connection broke within the body", error))?
            }
            FrameStream::Ended => None,
        };
        if frame.is_none() {
            self.source = FrameStream::Ended;
        }
        Ok(frame)
    }
}
