//! Transports of HTTP: a TCP socket that a forked child can close, which is opened, registered and closed inside
//! `fork::enter`. TLS over one is in `tls`.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket as RawSocket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use torchobj_core::fork::{self, Local};

/// An open connection to a server.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Send + Sync + Unpin {
    /// Returns whether the connection is open and has no unread bytes.
    fn is_idle(&self) -> bool;

    /// Returns whether the server receives the requests without TLS and without a proxy.
    fn is_plain(&self) -> bool {
        false
    }

    /// Returns whether a proxy forwards the requests.
    fn is_forwarded(&self) -> bool {
        false
    }
}

/// A connected socket. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct Socket {
    /// Taken only by `drop`, which closes it inside `fork::enter`. In a forked child it is closed already, and its number may
    /// belong to another file.
    stream: Local<TcpStream>,
    descriptor: RawFd,
    pub(super) is_forwarded: bool,
}

impl Socket {
    /// Connects to `address`, with `TCP_NODELAY`.
    pub(crate) async fn connect(address: SocketAddr) -> io::Result<Self> {
        let socket = Self::open(address)?;
        let stream = socket.stream.own();
        stream.writable().await?;
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        stream.set_nodelay(true)?;
        Ok(socket)
    }

    fn open(address: SocketAddr) -> io::Result<Self> {
        let inside = fork::enter();
        let raw = RawSocket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        raw.set_nonblocking(true)?;
        match raw.connect(&address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {}
            Err(error) => return Err(error),
        }
        let stream = TcpStream::from_std(raw.into())?;
        let descriptor = stream.as_raw_fd();
        fork::register(&inside, descriptor);
        Ok(Self { stream: Local::new(stream), descriptor, is_forwarded: false })
    }

    fn stream_mut(&mut self) -> Pin<&mut TcpStream> {
        Pin::new(self.stream.own_mut())
    }
}

impl Transport for Socket {
    fn is_idle(&self) -> bool {
        matches!(self.stream.own().try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    fn is_plain(&self) -> bool {
        !self.is_forwarded
    }

    fn is_forwarded(&self) -> bool {
        self.is_forwarded
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        let inside = fork::enter();
        fork::unregister(&inside, self.descriptor);
        drop(stream);
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream_mut().poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream_mut().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream_mut().poll_shutdown(cx)
    }
}
