//! Receives bodies that are chunked or that end with the connection, with hyper. The head of the response is received
//! already, so hyper gets a transport that discards its request and replays the received bytes.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::Request;
use http_body_util::Empty;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use torchobj_core::error::ErrorKind;

use super::{Connection, Failure, Transport};

/// The body of a response, frame by frame.
pub(crate) struct StreamedBody {
    driver: http1::Connection<TokioIo<Replay>, Empty<Bytes>>,
    /// Dropped at the end of the body: without it, hyper would close the connection.
    sender: Option<http1::SendRequest<Empty<Bytes>>>,
    body: Incoming,
    driver_done: bool,
    keep_alive: bool,
}

impl StreamedBody {
    /// The body of the response to a `method` request, whose head `connection` has received.
    pub(super) async fn open(connection: Connection, method: &'static str) -> Result<Self, Failure> {
        let keep_alive = connection.keeps_alive();
        let (transport, received) = connection.into_parts();
        let replay = Replay { transport, received, replayed: 0, request_sent: false, reader: None };
        let (mut sender, mut driver) = http1::handshake(TokioIo::new(replay)).await.map_err(broken)?;
        let request =
            Request::builder().method(method).uri("/").body(Empty::<Bytes>::new()).expect("method and path are ours");
        let mut driver_done = false;
        let response = {
            let mut response = pin!(sender.send_request(request));
            poll_fn(|context| {
                poll_driver(&mut driver, &mut driver_done, context)?;
                response.as_mut().poll(context).map_err(broken)
            })
            .await?
        };
        Ok(Self { driver, sender: Some(sender), body: response.into_body(), driver_done, keep_alive })
    }

    /// The next bytes; `None` at the end of the body.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let frame = poll_fn(|context| {
                poll_driver(&mut self.driver, &mut self.driver_done, context)?;
                Pin::new(&mut self.body).poll_frame(context).map(|frame| frame.transpose().map_err(broken))
            });
            match frame.await?.map(Frame::into_data) {
                Some(Ok(bytes)) => return Ok(Some(bytes)),
                // Trailers.
                Some(Err(_)) => {}
                None => break,
            }
        }
        self.sender = None;
        poll_fn(|context| {
            poll_driver(&mut self.driver, &mut self.driver_done, context)?;
            if self.driver_done { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await?;
        Ok(None)
    }

    /// The connection, after the end of the body.
    pub(super) fn into_connection(self) -> Connection {
        let parts = self.driver.into_parts();
        let Replay { transport, received, replayed, .. } = parts.io.into_inner();
        let rest = parts.read_buf.len() + received.len() - replayed;
        Connection::responded(transport, self.keep_alive && rest == 0)
    }
}

/// Polls the connection of hyper, which receives the body.
fn poll_driver(
    driver: &mut http1::Connection<TokioIo<Replay>, Empty<Bytes>>,
    driver_done: &mut bool,
    context: &mut Context<'_>,
) -> Result<(), Failure> {
    if !*driver_done && let Poll::Ready(ended) = driver.poll_without_shutdown(context) {
        *driver_done = true;
        ended.map_err(broken)?;
    }
    Ok(())
}

fn broken(error: hyper::Error) -> Failure {
    let kind = if error.is_incomplete_message() { ErrorKind::ShortBody } else { ErrorKind::Reset };
    Failure { source: Some(io::Error::other(error)), ..Failure::new(kind, "the connection broke within the body") }
}

/// A transport that discards written bytes, and replays `received` before it reads from `transport`.
struct Replay {
    transport: Transport,
    received: Vec<u8>,
    replayed: usize,
    /// Whether hyper has sent its request: it would close the connection if a response arrived earlier.
    request_sent: bool,
    reader: Option<Waker>,
}

impl AsyncRead for Replay {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.request_sent {
            self.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if self.replayed < self.received.len() {
            let count = buf.remaining().min(self.received.len() - self.replayed);
            buf.put_slice(&self.received[self.replayed..self.replayed + count]);
            self.replayed += count;
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.transport).poll_read(cx, buf)
    }
}

impl AsyncWrite for Replay {
    fn poll_write(mut self: Pin<&mut Self>, _cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.request_sent = true;
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
