//! Exchanges one request and response at a time over one connection.

use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use torchobj_core::buffer::Dest;
use torchobj_core::error::ErrorKind;

use super::head::Head;
use super::{Failure, Framing, Transport};

/// One read receives a head and a small body, or the first bytes of a large one.
const BUFFER_BYTES: usize = 8 << 10;

/// Maximum size of a head. S3 allows 2 KiB of metadata, plus its own headers.
const MAX_HEAD_BYTES: usize = 60 << 10;

/// Maximum number of pieces of a payload in one vectored write.
const SLICES: usize = 16;

/// A connection to a server, and the received bytes of its response that were not read yet.
pub(crate) struct Connection {
    transport: Transport,
    /// The head of the current response, and bytes received with it; `start..end` were not read yet.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    head: Head,
    /// Number of bytes of the current body that were not read yet, if its length is known.
    remaining: u64,
    /// Whether this connection has received a response before.
    used: bool,
    /// The request was not sent completely or the response was malformed: the connection cannot be reused.
    must_close: bool,
}

impl Connection {
    pub(super) fn new(transport: Transport) -> Self {
        Self {
            transport,
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
            head: Head::new(),
            remaining: 0,
            used: false,
            must_close: false,
        }
    }

    /// Returns whether the connection can be reused: the response was read to its end, and no bytes follow it.
    pub(super) fn is_reusable(&self) -> bool {
        let done = match self.head.framing {
            Framing::Empty | Framing::Length(_) => self.remaining == 0 && self.start == self.end,
            Framing::Streamed => false,
        };
        done && self.head.keep_alive && !self.must_close
    }

    /// Returns whether an idle connection is still open and has no unread bytes.
    pub(super) fn is_idle(&self) -> bool {
        self.transport.is_idle()
    }

    /// Sends a request and receives the head of its response. `bodiless`: the request is a HEAD.
    pub(crate) async fn exchange(&mut self, head: &[u8], payload: &[Bytes], bodiless: bool) -> Result<u16, Failure> {
        (self.start, self.end, self.remaining) = (0, 0, 0);
        // Until the response is received: if the request is cancelled, the connection is closed.
        self.must_close = true;
        let sent = self.send(head, payload).await;
        let received = self.receive_head(bodiless).await;
        match (sent, received) {
            // A server may respond and close before it has read the whole request: prefer the response to a broken pipe.
            (sent, Ok(())) => {
                self.used = true;
                self.must_close = !matches!(sent, Ok(true));
                Ok(self.head.status)
            }
            (Err(error), Err(_)) if self.used && self.end == 0 => Err(stale(Some(error))),
            (Err(error), Err(_)) => Err(Failure::broken("the connection broke while the request was sent", error)),
            (Ok(_), Err(failure)) => Err(failure),
        }
    }

    /// Sends the request. Returns false if the server responded before the whole request was sent.
    async fn send(&mut self, head: &[u8], payload: &[Bytes]) -> std::io::Result<bool> {
        let mut unsent = Unsent { head, payload, index: 0, offset: 0 };
        std::future::poll_fn(|cx| self.poll_send(cx, &mut unsent)).await
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, unsent: &mut Unsent<'_>) -> Poll<std::io::Result<bool>> {
        loop {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = unsent.slices(&mut slices);
            let written = if count > 0 {
                Pin::new(&mut self.transport).poll_write_vectored(cx, &slices[..count])
            } else {
                Pin::new(&mut self.transport).poll_flush(cx).map_ok(|()| 0)
            };
            match written? {
                Poll::Ready(_) if count == 0 => return Poll::Ready(Ok(true)),
                Poll::Ready(0) => return Poll::Ready(Err(std::io::ErrorKind::WriteZero.into())),
                Poll::Ready(bytes) => unsent.advance(bytes),
                Poll::Pending if unsent.payload.is_empty() => return Poll::Pending,
                Poll::Pending => {
                    let mut unfilled = ReadBuf::new(&mut self.buffer[self.end..]);
                    ready!(Pin::new(&mut self.transport).poll_read(cx, &mut unfilled))?;
                    let count = unfilled.filled().len();
                    self.end += count;
                    // A malformed response ends the sending too; `receive_head` returns its error.
                    let responded = self.has_response(false).unwrap_or(true);
                    if responded || count == 0 || self.end == self.buffer.len() {
                        return Poll::Ready(Ok(false));
                    }
                }
            }
        }
    }

    /// Returns whether the whole head of the response is received. Skips interim responses (1xx).
    fn has_response(&mut self, bodiless: bool) -> Result<bool, Failure> {
        while self.end > 0 && self.head.parse(&self.buffer[..self.end], bodiless)? {
            if !(100..200).contains(&self.head.status) {
                return Ok(true);
            }
            self.buffer.copy_within(self.head.end..self.end, 0);
            self.end -= self.head.end;
        }
        Ok(false)
    }

    async fn receive_head(&mut self, bodiless: bool) -> Result<(), Failure> {
        loop {
            if self.has_response(bodiless)? {
                break;
            }
            if self.end == self.buffer.len() {
                if self.end >= MAX_HEAD_BYTES {
                    return Err(Failure::new(ErrorKind::Protocol, "the head of the response is larger than 60 KiB"));
                }
                self.buffer.resize((self.end * 2).min(MAX_HEAD_BYTES), 0);
            }
            match self.transport.read(&mut self.buffer[self.end..]).await {
                Ok(0) if self.end == 0 && self.used => return Err(stale(None)),
                Ok(0) => {
                    return Err(Failure::new(ErrorKind::Reset, "the server closed the connection without a response"));
                }
                Ok(count) => self.end += count,
                Err(error) if self.end == 0 && self.used => return Err(stale(Some(error))),
                Err(error) => return Err(Failure::broken("the connection broke before the response", error)),
            }
        }
        self.start = self.head.end;
        self.remaining = match self.head.framing {
            Framing::Length(length) => length,
            Framing::Empty | Framing::Streamed => 0,
        };
        Ok(())
    }

    /// The framing of the current body.
    pub(crate) fn framing(&self) -> Framing {
        self.head.framing
    }

    /// The head of the current response, and its bytes.
    pub(super) fn head(&self) -> (&Head, &[u8]) {
        (&self.head, &self.buffer[..self.head.end])
    }

    /// All headers of the current response.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        self.head.headers(&self.buffer[..self.head.end])
    }

    /// Receives a body of known length into `dest`. Returns when the body ends or `dest` is full.
    pub(crate) async fn read_body(&mut self, dest: &mut Dest) -> Result<(), Failure> {
        let buffered = &self.buffer[self.start..self.end];
        let buffered = &buffered[..buffered.len().min(usize::try_from(self.remaining).unwrap_or(usize::MAX))];
        let copied = dest.fill(buffered);
        self.start += copied;
        self.remaining -= copied as u64;
        while self.remaining > 0 && dest.remaining() > 0 {
            let unfilled = dest.unfilled_mut();
            let max = unfilled.len().min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
            let count = match self.transport.read(&mut unfilled[..max]).await {
                Ok(0) => {
                    return Err(Failure::new(ErrorKind::ShortBody, "the server closed the connection within the body"));
                }
                Ok(count) => count,
                Err(error) => return Err(Failure::broken("the connection broke within the body", error)),
            };
            dest.advance(count);
            self.remaining -= count as u64;
        }
        Ok(())
    }

    /// Receives a body of known length and at most `limit` bytes.
    pub(super) async fn read_text(&mut self, limit: usize) -> Result<Vec<u8>, Failure> {
        let too_long = Failure::new(ErrorKind::Protocol, "the response is too long");
        let length = usize::try_from(self.remaining).ok().filter(|length| *length <= limit).ok_or(too_long)?;
        let mut text = vec![0; length];
        let buffered = (self.end - self.start).min(length);
        text[..buffered].copy_from_slice(&self.buffer[self.start..self.start + buffered]);
        self.start += buffered;
        match self.transport.read_exact(&mut text[buffered..]).await {
            Ok(_) => {
                self.remaining = 0;
                Ok(text)
            }
            Err(error) => Err(Failure::broken("the connection broke within the body", error)),
        }
    }

    /// Receives a body of known length without consuming it.
    pub(super) async fn peek_text(&mut self) -> Result<&[u8], Failure> {
        let end = self.start + usize::try_from(self.remaining).unwrap_or(usize::MAX);
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        if self.end < end {
            let read = self.transport.read_exact(&mut self.buffer[self.end..end]).await;
            read.map_err(|error| Failure::broken("the connection broke within the body", error))?;
            self.end = end;
        }
        Ok(&self.buffer[self.start..end])
    }

    /// Returns the transport, and all received bytes of the current response, including its head.
    pub(super) fn into_parts(self) -> (Transport, Vec<u8>) {
        let mut received = self.buffer;
        received.truncate(self.end);
        (self.transport, received)
    }

    /// A connection whose response was read to its end by hyper.
    pub(super) fn responded(transport: Transport, keep_alive: bool) -> Self {
        let mut connection = Self::new(transport);
        connection.used = true;
        connection.head.keep_alive = keep_alive;
        connection
    }

    /// Returns whether the current response allows the connection to be reused.
    pub(super) fn keeps_alive(&self) -> bool {
        self.head.keep_alive && !self.must_close
    }
}

fn stale(source: Option<std::io::Error>) -> Failure {
    Failure { source, ..Failure::new(ErrorKind::Stale, "the server closed the idle connection") }
}

/// The unsent rest of a request.
struct Unsent<'a> {
    head: &'a [u8],
    payload: &'a [Bytes],
    /// The current piece; 0 is the head.
    index: usize,
    offset: usize,
}

impl<'a> Unsent<'a> {
    fn piece(&self, index: usize) -> Option<&'a [u8]> {
        if index == 0 { Some(self.head) } else { self.payload.get(index - 1).map(|piece| &**piece) }
    }

    fn slices(&self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut count = 0;
        let mut offset = self.offset;
        let mut index = self.index;
        while let (Some(piece), true) = (self.piece(index), count < slices.len()) {
            if offset < piece.len() {
                slices[count] = IoSlice::new(&piece[offset..]);
                count += 1;
            }
            offset = 0;
            index += 1;
        }
        count
    }

    fn advance(&mut self, mut bytes: usize) {
        while let Some(piece) = self.piece(self.index) {
            let left = piece.len() - self.offset;
            if bytes < left {
                self.offset += bytes;
                return;
            }
            bytes -= left;
            self.index += 1;
            self.offset = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;
    use crate::config::HttpConfig;
    use crate::http::{Dialer, HostAddress, PoolMap};

    /// Exceeds the socket buffers, so that the response arrives while the body is sent.
    const BODY_BYTES: usize = 64 << 20;

    /// Sends a large body to a server that sends `first` before it reads, and `last` after it has read the whole body.
    async fn send_large_body(first: &'static [u8], last: &'static [u8]) -> Result<u16, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            for piece in first.chunks(7) {
                socket.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            if !last.is_empty() {
                let mut buffer = vec![0; 1 << 20];
                let mut left = BODY_BYTES;
                while left > 0 {
                    left -= socket.read(&mut buffer[..left.min(1 << 20)]).await.unwrap();
                }
                socket.write_all(last).await.unwrap();
            }
            socket
        };
        let client = async {
            let pools = PoolMap::new(Arc::new(Dialer::new(&HttpConfig::default()).unwrap()));
            let mut lease = pools.pool(&HostAddress { host: "127.0.0.1".into(), port, tls: false }).lease().await?;
            lease.connection().exchange(b"", &[vec![0; BODY_BYTES].into()], false).await
        };
        tokio::join!(server, client).1
    }

    #[tokio::test]
    async fn an_interim_response_does_not_stop_the_upload() {
        const DONE: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        for first in [
            &b"HTTP/1.1 100 Continue\r\n\r\n"[..],
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n",
        ] {
            let sent = tokio::time::timeout(std::time::Duration::from_secs(20), send_large_body(first, DONE)).await;
            assert_eq!(sent.expect("the whole body is sent").unwrap(), 200);
        }
    }

    #[tokio::test]
    async fn a_final_response_stops_the_upload() {
        let refusal = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(send_large_body(refusal, b"").await.unwrap(), 503);
        assert_eq!(send_large_body(b"nonsense\r\n\r\n", b"").await.unwrap_err().kind, ErrorKind::Protocol);
    }
}
