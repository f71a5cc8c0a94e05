//! One request at a time over one connection.

use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use torchobj_core::buffer::Dest;
use torchobj_core::error::ErrorKind;

use super::head::Head;
use super::{Failure, Framing, Transport};

/// Room for a head and, in the same call to the kernel, a small body or the first bytes of a large one.
const BUFFER_BYTES: usize = 8 << 10;

/// Heads do not grow above this: S3 has 2 KiB of metadata and some headers of its own.
const LARGEST_HEAD_BYTES: usize = 60 << 10;

/// Pieces of a payload that are offered to the kernel at a time.
const SLICES: usize = 16;

/// A connection to a server, and what of its answer was received and not yet taken.
pub(crate) struct Connection {
    transport: Transport,
    /// The head of the current answer, and what came with it; `start..end` were not taken yet.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    head: Head,
    /// What of the current body has not been received yet, where its length is known.
    remaining: u64,
    /// Whether requests were answered over this connection before.
    used: bool,
    /// The request was not sent whole, or the answer was not what the rules allow: no other request follows.
    spoilt: bool,
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
            spoilt: false,
        }
    }

    /// Whether another request may follow: the answer was taken to its last byte, and nothing came behind it.
    pub(super) fn is_reusable(&self) -> bool {
        let done = match self.head.framing {
            Framing::Empty | Framing::Length(_) => self.remaining == 0 && self.start == self.end,
            Framing::Odd => false,
        };
        done && self.head.keep_alive && !self.spoilt
    }

    /// Whether an idle connection is still open, with nothing in it.
    pub(super) fn is_quiet(&self) -> bool {
        self.transport.is_quiet()
    }

    /// Sends a request and receives the head of its answer. `bodiless` is a HEAD.
    pub(crate) async fn exchange(&mut self, head: &[u8], payload: &[Bytes], bodiless: bool) -> Result<u16, Failure> {
        (self.start, self.end, self.remaining) = (0, 0, 0);
        // Until its answer has begun: a request that is given up half-way takes the connection with it.
        self.spoilt = true;
        let sent = self.send(head, payload).await;
        let received = self.receive_head(bodiless).await;
        match (sent, received) {
            // A server may answer and close before it has read everything: its answer says more than a broken pipe.
            (sent, Ok(())) => {
                self.used = true;
                self.spoilt = !matches!(sent, Ok(true));
                Ok(self.head.status)
            }
            (Err(error), Err(_)) if self.used && self.end == 0 => Err(stale(Some(error))),
            (Err(error), Err(_)) => Err(Failure::broken("the connection broke while the request was sent", error)),
            (Ok(_), Err(failure)) => Err(failure),
        }
    }

    /// Sends everything and says true; or false when the server answered before it had read it all.
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
                    let mut room = ReadBuf::new(&mut self.buffer[self.end..]);
                    ready!(Pin::new(&mut self.transport).poll_read(cx, &mut room))?;
                    let count = room.filled().len();
                    self.end += count;
                    // What is malformed ends the sending too: it is met again when the answer is received.
                    let answered = self.is_answered(false).unwrap_or(true);
                    if answered || count == 0 || self.end == self.buffer.len() {
                        return Poll::Ready(Ok(false));
                    }
                }
            }
        }
    }

    /// Whether the head of the answer is there, whole. 100 Continue and 103 Early Hints are none: they say nothing that
    /// we asked for, and are passed over.
    fn is_answered(&mut self, bodiless: bool) -> Result<bool, Failure> {
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
            if self.is_answered(bodiless)? {
                break;
            }
            if self.end == self.buffer.len() {
                if self.end >= LARGEST_HEAD_BYTES {
                    return Err(Failure::new(ErrorKind::Protocol, "the head of the answer has no end"));
                }
                self.buffer.resize((self.end * 2).min(LARGEST_HEAD_BYTES), 0);
            }
            match self.transport.read(&mut self.buffer[self.end..]).await {
                Ok(0) if self.end == 0 && self.used => return Err(stale(None)),
                Ok(0) => return Err(Failure::new(ErrorKind::Reset, "the server closed the connection unanswered")),
                Ok(count) => self.end += count,
                Err(error) if self.end == 0 && self.used => return Err(stale(Some(error))),
                Err(error) => return Err(Failure::broken("the connection broke before the answer", error)),
            }
        }
        self.start = self.head.end;
        self.remaining = match self.head.framing {
            Framing::Length(length) => length,
            Framing::Empty | Framing::Odd => 0,
        };
        Ok(())
    }

    /// How the end of the current body is known.
    pub(crate) fn framing(&self) -> Framing {
        self.head.framing
    }

    /// The head of the current answer, and its bytes.
    pub(super) fn head(&self) -> (&Head, &[u8]) {
        (&self.head, &self.buffer[..self.head.end])
    }

    /// All headers of the current answer.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        self.head.headers(&self.buffer[..self.head.end])
    }

    /// Receives the body, of known length, into `dest`; returns when it ended or `dest` is full.
    pub(crate) async fn read_body(&mut self, dest: &mut Dest) -> Result<(), Failure> {
        let here = &self.buffer[self.start..self.end];
        let here = &here[..here.len().min(usize::try_from(self.remaining).unwrap_or(usize::MAX))];
        let taken = dest.fill(here);
        self.start += taken;
        self.remaining -= taken as u64;
        while self.remaining > 0 && dest.remaining() > 0 {
            let room = dest.unfilled_mut();
            let most = room.len().min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
            let count = match self.transport.read(&mut room[..most]).await {
                Ok(0) => {
                    return Err(Failure::new(ErrorKind::ShortBody, "the server closed the connection in the body"));
                }
                Ok(count) => count,
                Err(error) => return Err(Failure::broken("the connection broke in the body", error)),
            };
            dest.advance(count);
            self.remaining -= count as u64;
        }
        Ok(())
    }

    /// Receives a short body of known length.
    pub(super) async fn read_text(&mut self, limit: usize) -> Result<Vec<u8>, Failure> {
        let too_long = Failure::new(ErrorKind::Protocol, "the answer is too long");
        let length = usize::try_from(self.remaining).ok().filter(|length| *length <= limit).ok_or(too_long)?;
        let mut text = vec![0; length];
        let here = (self.end - self.start).min(length);
        text[..here].copy_from_slice(&self.buffer[self.start..self.start + here]);
        self.start += here;
        match self.transport.read_exact(&mut text[here..]).await {
            Ok(_) => {
                self.remaining = 0;
                Ok(text)
            }
            Err(error) => Err(Failure::broken("the connection broke in the body", error)),
        }
    }

    /// Receives a body of known length, and leaves it to be taken.
    pub(super) async fn peek_text(&mut self) -> Result<&[u8], Failure> {
        let end = self.start + usize::try_from(self.remaining).unwrap_or(usize::MAX);
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        if self.end < end {
            let read = self.transport.read_exact(&mut self.buffer[self.end..end]).await;
            read.map_err(|error| Failure::broken("the connection broke in the body", error))?;
            self.end = end;
        }
        Ok(&self.buffer[self.start..end])
    }

    /// The connection without its state, and everything of the current answer that was received, its head included.
    pub(super) fn into_parts(self) -> (Transport, Vec<u8>) {
        let mut received = self.buffer;
        received.truncate(self.end);
        (self.transport, received)
    }

    /// A connection over which an answer was read by other means, to its end.
    pub(super) fn answered(transport: Transport, keep_alive: bool) -> Self {
        let mut connection = Self::new(transport);
        connection.used = true;
        connection.head.keep_alive = keep_alive;
        connection
    }

    /// Whether the current answer allows another request.
    pub(super) fn keeps_alive(&self) -> bool {
        self.head.keep_alive && !self.spoilt
    }
}

fn stale(source: Option<std::io::Error>) -> Failure {
    Failure { kind: ErrorKind::Stale, message: "the server had closed the kept connection", source, hint: None }
}

/// What of a request is still to be sent.
struct Unsent<'a> {
    head: &'a [u8],
    payload: &'a [Bytes],
    /// The piece being sent: 0 is the head.
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
    use crate::http::{Dialer, Pool, Target};

    /// More than the buffers of two sockets hold: the server's words come while it is being sent.
    const BODY_BYTES: usize = 64 << 20;

    /// Sends a large body to a server that says `first` before it has read a byte, then `last` when it has read all.
    async fn told(first: &'static [u8], last: &'static [u8]) -> Result<u16, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            for piece in first.chunks(7) {
                socket.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            if !last.is_empty() {
                let mut room = vec![0; 1 << 20];
                let mut left = BODY_BYTES;
                while left > 0 {
                    left -= socket.read(&mut room[..left.min(1 << 20)]).await.unwrap();
                }
                socket.write_all(last).await.unwrap();
            }
            socket
        };
        let client = async {
            let pool = Pool::new(Arc::new(Dialer::new(&HttpConfig::default()).unwrap()));
            let mut lease = pool.line(&Target { host: "127.0.0.1".into(), port, tls: false }).lease().await?;
            lease.connection().exchange(b"", &[vec![0; BODY_BYTES].into()], false).await
        };
        tokio::join!(server, client).1
    }

    #[tokio::test]
    async fn what_is_no_answer_yet_does_not_end_the_sending() {
        const DONE: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        for first in [
            &b"HTTP/1.1 100 Continue\r\n\r\n"[..],
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n",
        ] {
            let told = tokio::time::timeout(std::time::Duration::from_secs(20), told(first, DONE)).await;
            assert_eq!(told.expect("the whole body is sent").unwrap(), 200);
        }
    }

    #[tokio::test]
    async fn an_answer_ends_the_sending() {
        let refusal = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(told(refusal, b"").await.unwrap(), 503);
        assert_eq!(told(b"nonsense\r\n\r\n", b"").await.unwrap_err().kind, ErrorKind::Protocol);
    }
}
