//! TLS over a socket, with rustls. Reads up to 72 KiB per system call; the stream of rustls reads 4 to 18 KiB. Independent
//! of HTTP.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::ClientConfig;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::socket::{Socket, Transport};

/// Maximum number of bytes of one read: four records, each with at most 16 KiB of data and 2 KiB of overhead (RFC 8446,
/// section 5.2).
const INCOMING_BYTES: usize = 72 << 10;

/// Maximum number of bytes that one write encrypts: small enough to stay in the CPU cache until they are sent.
const CHUNK_BYTES: usize = 64 << 10;

/// A TLS connection over a socket.
pub(crate) struct TlsStream {
    socket: Socket,
    session: UnbufferedClientConnection,
    /// Received records; `start..end` are not decrypted yet.
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
    /// Records to send; `..sent` are sent.
    outgoing: Vec<u8>,
    sent: usize,
    /// Decrypted bytes that did not fit into the buffer of the reader; `..taken` were read since.
    plain: Vec<u8>,
    taken: usize,
    /// The peer has closed the connection or its sending side.
    ended: bool,
}

/// State of the session after all received records are processed.
#[derive(PartialEq, Eq)]
enum Phase {
    /// It needs more records of the handshake from the peer.
    Handshake,
    /// The handshake is complete.
    Traffic,
}

impl TlsStream {
    /// Performs the handshake with the server `name` over `socket`.
    pub(crate) async fn connect(
        socket: Socket,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> io::Result<Self> {
        let session = UnbufferedClientConnection::new(config, name).map_err(io::Error::other)?;
        let mut stream = Self {
            socket,
            session,
            incoming: vec![0; INCOMING_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            outgoing: Vec::new(),
            sent: 0,
            plain: Vec::new(),
            taken: 0,
            ended: false,
        };
        std::future::poll_fn(|cx| stream.poll_handshake(cx)).await?;
        Ok(stream)
    }

    fn poll_handshake(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let phase = self.process(&mut ReadBuf::new(&mut []))?;
            ready!(self.poll_send(cx))?;
            if phase == Phase::Traffic {
                return Poll::Ready(Ok(()));
            }
            if self.ended {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the server closed the connection within the TLS handshake",
                )));
            }
            ready!(self.poll_receive(cx))?;
        }
    }

    /// Decrypts received records into `out`, and into `plain` if `out` is full. Encodes records that must be sent.
    fn process(&mut self, out: &mut ReadBuf<'_>) -> io::Result<Phase> {
        loop {
            let UnbufferedStatus { discard, state } =
                self.session.process_tls_records(&mut self.incoming[self.start..self.end]);
            let mut phase = None;
            match state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let payload = record.map_err(io::Error::other)?.payload;
                        let count = payload.len().min(out.remaining());
                        out.put_slice(&payload[..count]);
                        self.plain.extend_from_slice(&payload[count..]);
                    }
                }
                ConnectionState::EncodeTlsData(mut encode) => {
                    let at = self.outgoing.len();
                    if let Err(EncodeError::InsufficientSize(size)) = encode.encode(&mut []) {
                        self.outgoing.resize(at + size.required_size, 0);
                    }
                    let count = encode.encode(&mut self.outgoing[at..]).map_err(io::Error::other)?;
                    self.outgoing.truncate(at + count);
                }
                // The callers send the encoded records before they wait for others.
                ConnectionState::TransmitTlsData(transmit) => transmit.done(),
                ConnectionState::BlockedHandshake => phase = Some(Phase::Handshake),
                ConnectionState::WriteTraffic(_) => phase = Some(Phase::Traffic),
                _ => {
                    self.ended = true;
                    phase = Some(Phase::Traffic);
                }
            }
            self.start += discard;
            // If bytes are left, `poll_receive` moves them to the start.
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            if let Some(phase) = phase {
                return Ok(phase);
            }
        }
    }

    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.start > 0 {
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut unfilled = ReadBuf::new(&mut self.incoming[self.end..]);
        ready!(Pin::new(&mut self.socket).poll_read(cx, &mut unfilled))?;
        let count = unfilled.filled().len();
        self.ended |= count == 0;
        self.end += count;
        Poll::Ready(Ok(()))
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.outgoing.len() {
            let count = ready!(Pin::new(&mut self.socket).poll_write(cx, &self.outgoing[self.sent..]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += count;
        }
        self.outgoing.clear();
        self.sent = 0;
        Poll::Ready(Ok(()))
    }

    /// Encrypts `plain` and appends it to `outgoing`.
    fn encrypt(&mut self, plain: &[u8]) -> io::Result<()> {
        let status = self.session.process_tls_records(&mut self.incoming[self.start..self.start]);
        let state = status.state.map_err(io::Error::other)?;
        let ConnectionState::WriteTraffic(mut traffic) = state else {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the TLS session is closed"));
        };
        let at = self.outgoing.len();
        // Header and tag add at most 22 bytes to each record of at most 16 KiB.
        self.outgoing.resize(at + plain.len() + (plain.len() / (16 << 10) + 1) * 64, 0);
        let count = match traffic.encrypt(plain, &mut self.outgoing[at..]) {
            Err(EncryptError::InsufficientSize(size)) => {
                self.outgoing.resize(at + size.required_size, 0);
                traffic.encrypt(plain, &mut self.outgoing[at..])
            }
            done => done,
        };
        self.outgoing.truncate(at + count.map_err(io::Error::other)?);
        Ok(())
    }
}

impl Transport for TlsStream {
    /// A session ticket that arrives between two requests counts as unread bytes: the connection is then not reused, which is
    /// safe.
    fn is_idle(&self) -> bool {
        self.plain.len() == self.taken && self.start == self.end && !self.ended && self.socket.is_idle()
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.taken < this.plain.len() {
            let count = out.remaining().min(this.plain.len() - this.taken);
            out.put_slice(&this.plain[this.taken..this.taken + count]);
            this.taken += count;
            if this.taken == this.plain.len() {
                this.plain.clear();
                this.taken = 0;
            }
            return Poll::Ready(Ok(()));
        }
        let before = out.filled().len();
        loop {
            this.process(out)?;
            if out.filled().len() > before || this.ended {
                return Poll::Ready(Ok(()));
            }
            ready!(this.poll_send(cx))?;
            ready!(this.poll_receive(cx))?;
        }
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, plain: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_send(cx))?;
        let count = plain.len().min(CHUNK_BYTES);
        self.encrypt(&plain[..count])?;
        // The bytes count as written: records that the socket does not accept now are sent by the next call.
        if let Poll::Ready(Err(error)) = self.poll_send(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_send(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
