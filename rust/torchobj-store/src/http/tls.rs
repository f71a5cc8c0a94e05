//! TLS over a socket by rustls, read in large pieces: rustls' own stream reads 4 to 18 KiB a call. Knows no HTTP.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::ClientConfig;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::socket::Socket;

/// Four records and a little: as much as one call to the kernel brings. A record has at most 16 KiB and 2 KiB of its
/// own (RFC 8446, section 5.2).
const INCOMING_BYTES: usize = 72 << 10;

/// Plain bytes that are encrypted at a time: they stay in the cache between the two passes.
const CHUNK_BYTES: usize = 64 << 10;

/// A socket that speaks TLS.
pub(crate) struct TlsStream {
    socket: Socket,
    session: UnbufferedClientConnection,
    /// Records as they came; `start..end` are not decrypted yet.
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
    /// Records to be sent; those before `sent` are.
    outgoing: Vec<u8>,
    sent: usize,
    /// Decrypted bytes that found no room; those before `taken` were read since.
    plain: Vec<u8>,
    taken: usize,
    /// The peer said that it sends nothing more, or closed.
    ended: bool,
}

/// What the session waits for when it can do nothing more with what is there.
#[derive(PartialEq, Eq)]
enum Wants {
    /// More of the handshake from the peer.
    Handshake,
    /// Anything: the handshake is done.
    Traffic,
}

impl TlsStream {
    /// Shakes hands with `name` over `socket`.
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

    /// Whether nothing arrived since the last answer was read. Between requests TLS itself may have sent something
    /// (tickets); then this says no, and costs a connection, never an answer.
    pub(crate) fn is_quiet(&self) -> bool {
        self.plain.len() == self.taken && self.start == self.end && !self.ended && self.socket.is_quiet()
    }

    fn poll_handshake(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let wants = self.process(&mut ReadBuf::new(&mut []))?;
            ready!(self.poll_send(cx))?;
            if wants == Wants::Traffic {
                return Poll::Ready(Ok(()));
            }
            if self.ended {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "closed within the TLS handshake",
                )));
            }
            ready!(self.poll_receive(cx))?;
        }
    }

    /// Decrypts what came into `out`, what finds no room there into `plain`, and encodes what must be answered.
    fn process(&mut self, out: &mut ReadBuf<'_>) -> io::Result<Wants> {
        loop {
            let UnbufferedStatus { discard, state } =
                self.session.process_tls_records(&mut self.incoming[self.start..self.end]);
            let mut wants = None;
            match state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let payload = record.map_err(io::Error::other)?.payload;
                        let room = payload.len().min(out.remaining());
                        out.put_slice(&payload[..room]);
                        self.plain.extend_from_slice(&payload[room..]);
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
                // They are sent before anything is waited for.
                ConnectionState::TransmitTlsData(transmit) => transmit.done(),
                ConnectionState::BlockedHandshake => wants = Some(Wants::Handshake),
                ConnectionState::WriteTraffic(_) => wants = Some(Wants::Traffic),
                _ => {
                    self.ended = true;
                    wants = Some(Wants::Traffic);
                }
            }
            self.start += discard;
            // Room behind is made when nothing is left, or at the next receive.
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            if let Some(wants) = wants {
                return Ok(wants);
            }
        }
    }

    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.start > 0 {
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut room = ReadBuf::new(&mut self.incoming[self.end..]);
        ready!(Pin::new(&mut self.socket).poll_read(cx, &mut room))?;
        let count = room.filled().len();
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

    /// Encrypts `plain` behind what is to be sent.
    fn encrypt(&mut self, plain: &[u8]) -> io::Result<()> {
        let status = self.session.process_tls_records(&mut self.incoming[self.start..self.start]);
        let state = status.state.map_err(io::Error::other)?;
        let ConnectionState::WriteTraffic(mut traffic) = state else {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the TLS session takes no more data"));
        };
        let at = self.outgoing.len();
        // Each record of at most 16 KiB grows by at most 22 bytes, header and tag.
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
        // The records are ours to send now, whether the socket takes them at once or at the next call.
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
