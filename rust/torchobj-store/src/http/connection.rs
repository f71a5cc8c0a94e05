//! Exchanges one request and response at a time over one connection.

use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use httparse::Status;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use torchobj_core::buffer::Dest;
use torchobj_core::error::ErrorKind;

use super::failure::NEEDS_TLS;
use super::head::Head;
use super::{Failure, Framing, Transport};

/// One read receives a head and a small body, or the first bytes of a large one.
const BUFFER_BYTES: usize = 8 << 10;

/// Maximum size of a head, and of all interim responses to a request. S3 allows 2 KiB of metadata, plus its own headers.
const MAX_HEAD_BYTES: usize = 60 << 10;

/// Maximum number of bytes of a frame of a body whose length is not known.
const FRAME_BYTES: u64 = 64 << 10;

/// Maximum number of bytes of the extensions and trailers of a chunked body.
const MAX_EXTENSION_BYTES: usize = 16 << 10;

/// Maximum number of bytes before a chunk without extensions: the end of the previous one, and a size of 16 digits.
const CHUNK_HEAD_BYTES: usize = 2 + 16 + 2;

/// Maximum number of pieces of a payload in one vectored write.
const SLICES: usize = 16;

/// A connection to a server, and the received bytes of its response that were not read yet.
pub(crate) struct Connection {
    transport: Box<dyn Transport>,
    /// The head of the current response, and bytes received with it; `start..end` were not read yet.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    head: Head,
    /// Number of bytes of the interim responses to the current request.
    interim_bytes: usize,
    /// Number of bytes of the current body, or of its current chunk, that were not read yet.
    remaining: u64,
    /// Number of bytes of the extensions of a chunked body, after its first chunk has begun.
    extension_bytes: Option<usize>,
    /// Whether no chunk follows.
    last_chunk: bool,
    /// Whether this connection has received a response before.
    used: bool,
    /// The request was not sent completely or the response was malformed: the connection cannot be reused.
    must_close: bool,
}

impl Connection {
    pub(super) fn new(transport: Box<dyn Transport>) -> Self {
        Self {
            transport,
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
            head: Head::new(),
            interim_bytes: 0,
            remaining: 0,
            extension_bytes: None,
            last_chunk: true,
            used: false,
            must_close: false,
        }
    }

    /// Returns whether the connection can be reused: the response was read to its end, and no bytes follow it.
    pub(super) fn is_reusable(&self) -> bool {
        let done = self.remaining == 0 && self.last_chunk && self.start == self.end;
        done && self.head.framing != Framing::UntilClosed && self.head.keep_alive && !self.must_close
    }

    /// Returns whether an idle connection is still open and has no unread bytes.
    pub(super) fn is_idle(&self) -> bool {
        self.transport.is_idle()
    }

    /// Sends a request and receives the head of its response. `bodiless`: the request is a HEAD.
    pub(crate) async fn exchange(&mut self, head: &[u8], payload: &[Bytes], bodiless: bool) -> Result<u16, Failure> {
        (self.start, self.end, self.remaining, self.interim_bytes) = (0, 0, 0, 0);
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
            // Each of them counts as progress of an upload.
            self.interim_bytes += self.head.end;
            if self.interim_bytes > MAX_HEAD_BYTES {
                return Err(Failure::new(ErrorKind::Protocol, "the interim responses are larger than 60 KiB"));
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
                    return Err(self.no_response("the server closed the connection without a response", None));
                }
                Ok(count) => self.end += count,
                Err(error) if self.end == 0 && self.used => return Err(stale(Some(error))),
                Err(error) => return Err(self.no_response("the connection broke before the response", Some(error))),
            }
        }
        self.start = self.head.end;
        self.remaining = match self.head.framing {
            Framing::Length(length) => length,
            Framing::Empty | Framing::Chunked => 0,
            Framing::UntilClosed => u64::MAX,
        };
        (self.extension_bytes, self.last_chunk) = (None, self.head.framing != Framing::Chunked);
        Ok(())
    }

    fn no_response(&self, message: &'static str, source: Option<std::io::Error>) -> Failure {
        let hint = (self.end == 0 && self.transport.is_plain()).then_some(NEEDS_TLS);
        Failure { source, hint, ..Failure::new(ErrorKind::Reset, message) }
    }

    /// The framing of the current body.
    pub(crate) fn framing(&self) -> Framing {
        self.head.framing
    }

    /// A header of the current response. Available also after its body was received.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.header(&self.buffer[..self.head.end], name)
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
                Ok(0) => return Err(incomplete_body()),
                Ok(count) => count,
                Err(error) => return Err(broken_body(error)),
            };
            dest.advance(count);
            self.remaining -= count as u64;
        }
        Ok(())
    }

    /// The next bytes of a body that is chunked or ends with the connection; `None` at its end.
    pub(super) async fn next_frame(&mut self) -> Result<Option<Bytes>, Failure> {
        if self.remaining == 0 && !self.last_chunk {
            self.begin_chunk().await?;
        }
        if self.remaining == 0 {
            return Ok(None);
        }
        let max = usize::try_from(self.remaining.min(FRAME_BYTES)).expect("a frame is small");
        let mut frame = BytesMut::with_capacity(max);
        let buffered = &self.buffer[self.start..self.end];
        frame.extend_from_slice(&buffered[..buffered.len().min(max)]);
        self.start += frame.len();
        if frame.is_empty() && self.transport.read_buf(&mut (&mut frame).limit(max)).await.map_err(broken_body)? == 0 {
            if self.head.framing != Framing::UntilClosed {
                return Err(incomplete_body());
            }
            self.remaining = 0;
            return Ok(None);
        }
        self.remaining -= frame.len() as u64;
        Ok(Some(frame.freeze()))
    }

    /// Receives the head of the next chunk, or the trailers after the last one.
    async fn begin_chunk(&mut self) -> Result<(), Failure> {
        loop {
            let malformed = |_| Failure::new(ErrorKind::Protocol, "the chunks of the body are malformed");
            let head = chunk_head(&self.buffer[self.start..self.end], self.extension_bytes.is_none());
            if let Status::Complete((length, size)) = head.map_err(malformed)? {
                let extension_bytes = self.extension_bytes.unwrap_or(0) + length.saturating_sub(CHUNK_HEAD_BYTES);
                if extension_bytes > MAX_EXTENSION_BYTES {
                    return Err(malformed(httparse::Error::Token));
                }
                self.start += length;
                (self.remaining, self.extension_bytes, self.last_chunk) = (size, Some(extension_bytes), size == 0);
                return Ok(());
            }
            // The head of the response is kept, and the incomplete head of the chunk is moved behind it.
            let begin = self.head.end;
            self.buffer.copy_within(self.start..self.end, begin);
            (self.start, self.end) = (begin, begin + self.end - self.start);
            if self.end - begin > MAX_EXTENSION_BYTES {
                return Err(malformed(httparse::Error::Token));
            }
            if self.end == self.buffer.len() {
                self.buffer.resize(self.end + BUFFER_BYTES, 0);
            }
            match self.transport.read(&mut self.buffer[self.end..]).await.map_err(broken_body)? {
                0 => return Err(incomplete_body()),
                count => self.end += count,
            }
        }
    }

    /// Receives a body of at most `limit` bytes.
    pub(super) async fn read_text(&mut self, limit: usize) -> Result<Vec<u8>, Failure> {
        let too_long = || Failure::new(ErrorKind::Protocol, "the response is too long");
        if matches!(self.head.framing, Framing::Chunked | Framing::UntilClosed) {
            let mut text = Vec::new();
            while let Some(bytes) = self.next_frame().await? {
                if text.len() + bytes.len() > limit {
                    return Err(too_long());
                }
                text.extend_from_slice(&bytes);
            }
            return Ok(text);
        }
        let length = usize::try_from(self.remaining).ok().filter(|length| *length <= limit).ok_or_else(too_long)?;
        let mut text = vec![0; length];
        let buffered = (self.end - self.start).min(length);
        text[..buffered].copy_from_slice(&self.buffer[self.start..self.start + buffered]);
        self.start += buffered;
        match self.transport.read_exact(&mut text[buffered..]).await {
            Ok(_) => {
                self.remaining = 0;
                Ok(text)
            }
            Err(error) => Err(broken_body(error)),
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
            read.map_err(broken_body)?;
            self.end = end;
        }
        Ok(&self.buffer[self.start..end])
    }
}

fn broken_body(error: std::io::Error) -> Failure {
    Failure::broken("the connection broke within the body", error)
}

fn incomplete_body() -> Failure {
    Failure::new(ErrorKind::ShortBody, "the server closed the connection within the body")
}

/// Parses the start of a chunk: the end of the previous one unless it is the `first`, the size, and the trailers after the
/// last one, whose size is 0. Returns the number of its bytes, and the size.
fn chunk_head(bytes: &[u8], first: bool) -> httparse::Result<(usize, u64)> {
    let end = if first { &b""[..] } else { b"\r\n" };
    let Some(rest) = bytes.strip_prefix(end) else {
        return if end.starts_with(bytes) { Ok(Status::Partial) } else { Err(httparse::Error::NewLine) };
    };
    // httparse takes a size without digits for 0, and line feeds for text of an extension.
    if rest.first().is_some_and(|digit| !digit.is_ascii_hexdigit()) {
        return Err(httparse::Error::Token);
    }
    let Status::Complete((length, size)) = httparse::parse_chunk_size(rest).map_err(|_| httparse::Error::Token)? else {
        return Ok(Status::Partial);
    };
    if rest[..length - 2].contains(&b'\n') {
        return Err(httparse::Error::NewLine);
    }
    if size > 0 {
        return Ok(Status::Complete((end.len() + length, size)));
    }
    Ok(match httparse::parse_headers(&rest[length..], &mut [httparse::EMPTY_HEADER; 64])? {
        Status::Complete((trailers, _)) => Status::Complete((end.len() + length + trailers, size)),
        Status::Partial => Status::Partial,
    })
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
    use crate::fake::Fake;
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
            lease.exchange(b"", &[vec![0; BODY_BYTES].into()], false).await
        };
        tokio::join!(server, client).1
    }

    /// A transport whose reads return at most `max` of the bytes, and then the end of the stream.
    struct Received {
        bytes: Vec<u8>,
        max: usize,
    }

    impl Transport for Received {
        fn is_idle(&self) -> bool {
            self.bytes.is_empty()
        }
    }

    impl AsyncRead for Received {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<std::io::Result<()>> {
            let count = self.max.min(buf.remaining()).min(self.bytes.len());
            buf.put_slice(&self.bytes.drain(..count).collect::<Vec<_>>());
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Received {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
            Poll::Ready(Ok(buf.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// A connection that has received the head of `response`.
    async fn responded(response: &str, max: usize) -> Connection {
        let mut connection = Connection::new(Box::new(Received { bytes: response.into(), max }));
        connection.exchange(b"GET / HTTP/1.1\r\n\r\n", &[], false).await.unwrap();
        connection
    }

    const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    const CHUNKS: &str = "5;a=\"b\"\r\nhello\r\n1\r\n,\r\n00006 \r\n world\r\n0\r\nX: y\r\n\r\n";

    #[tokio::test]
    async fn the_interim_responses_to_a_request_are_limited() {
        let interim = "HTTP/1.1 100 Continue\r\n\r\n";
        for (count, expected) in [(MAX_HEAD_BYTES / interim.len(), Ok(200)), (10_000, Err(ErrorKind::Protocol))] {
            let bytes = format!("{}HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", interim.repeat(count)).into();
            let mut connection = Connection::new(Box::new(Received { bytes, max: 1000 }));
            let status = connection.exchange(b"PUT / HTTP/1.1\r\n\r\n", &[], false).await;
            assert_eq!(status.map_err(|failure| failure.kind), expected);
            assert_eq!(connection.is_reusable(), expected.is_ok());
        }
    }

    #[tokio::test]
    async fn a_chunked_body_is_received_in_pieces_of_any_size() {
        for max in 1..=CHUNKED.len() + CHUNKS.len() {
            let mut connection = responded(&format!("{CHUNKED}{CHUNKS}"), max).await;
            assert_eq!(connection.read_text(12).await.unwrap(), b"hello, world", "{max}");
            assert!(connection.is_reusable() && connection.is_idle(), "{max}");
            assert_eq!(connection.header("transfer-encoding"), Some("chunked"));
        }
    }

    #[tokio::test]
    async fn a_body_that_ends_early_is_incomplete() {
        for end in 0..CHUNKS.len() {
            let mut connection = responded(&format!("{CHUNKED}{}", &CHUNKS[..end]), 7).await;
            assert_eq!(connection.read_text(12).await.unwrap_err().kind, ErrorKind::ShortBody, "{end}");
            assert!(!connection.is_reusable(), "{end}");
        }
        let mut connection = responded("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello", 100).await;
        assert_eq!(connection.next_frame().await.unwrap().as_deref(), Some(&b"hello"[..]));
        assert_eq!(connection.next_frame().await.unwrap_err().kind, ErrorKind::ShortBody);
    }

    #[tokio::test]
    async fn a_connection_with_bytes_after_the_last_chunk_is_not_reused() {
        let smuggled = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx";
        for max in [1, 30, 1000] {
            let mut connection = responded(&format!("{CHUNKED}{CHUNKS}{smuggled}"), max).await;
            assert_eq!(connection.read_text(12).await.unwrap(), b"hello, world");
            assert!(!connection.is_reusable() || !connection.is_idle(), "{max}");
        }
        let both = CHUNKED.replace("\r\n\r\n", "\r\nContent-Length: 40\r\n\r\n");
        let mut connection = responded(&format!("{both}{CHUNKS}"), 1000).await;
        assert_eq!(connection.read_text(12).await.unwrap(), b"hello, world");
        assert!(!connection.is_reusable(), "the length of the body is ambiguous");
    }

    #[tokio::test]
    async fn the_largest_chunk_allocates_one_frame() {
        let mut connection = responded(&format!("{CHUNKED}ffffffffffffffff\r\nhello"), 1000).await;
        assert_eq!(connection.next_frame().await.unwrap().as_deref(), Some(&b"hello"[..]));
        assert_eq!(connection.next_frame().await.unwrap_err().kind, ErrorKind::ShortBody);
    }

    #[test]
    fn the_head_of_a_chunk_is_parsed_strictly() {
        for (bytes, first, expected) in [
            (&b"5\r\nhello"[..], true, Some((3, 5))),
            (b"\r\nfF;a=b\r\n", false, Some((10, 255))),
            (b"0\r\n\r\n", true, Some((5, 0))),
            (b"\r\n0\r\nX: y\r\n\r\n", false, Some((13, 0))),
            (b"", true, None),
            (b"\r", false, None),
            (b"5\r", true, None),
            (b"0\r\nX: y\r\n", true, None),
        ] {
            let found = match chunk_head(bytes, first).unwrap() {
                Status::Complete(found) => Some(found),
                Status::Partial => None,
            };
            assert_eq!(found, expected, "{}", bytes.escape_ascii());
        }
        for (bytes, first) in [
            (&b"\r\n"[..], true),
            (b";a\r\n", true),
            (b"-1\r\n", true),
            (b"11111111111111111\r\n", true),
            (b"5;a\nb\r\n", true),
            (b"0\r\nno trailer\r\n\r\n", true),
            (b"5\r\n", false),
        ] {
            assert!(chunk_head(bytes, first).is_err(), "{}", bytes.escape_ascii());
        }
    }

    #[tokio::test]
    async fn the_extensions_of_a_chunked_body_are_limited() {
        let chunk = format!("1;{}\r\nx\r\n", "e".repeat(1000));
        for (count, received) in [(10, Ok(10)), (20, Err(ErrorKind::Protocol))] {
            let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
            let response = format!("{head}{}0\r\nTrailer: 1\r\n\r\n", chunk.repeat(count));
            let fake = Fake::start(move |_| response.clone()).await;
            let pools = PoolMap::new(Arc::new(Dialer::new(&HttpConfig::default()).unwrap()));
            let mut lease = pools.pool(&HostAddress::of(&fake.url.parse().unwrap())).lease().await.unwrap();
            lease.exchange(b"GET / HTTP/1.1\r\n\r\n", &[], false).await.unwrap();
            let text = lease.read_text(100).await;
            assert_eq!(text.map(|text| text.len()).map_err(|failure| failure.kind), received);
            assert_eq!(lease.is_reusable(), received.is_ok());
        }
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
