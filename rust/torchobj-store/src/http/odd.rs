//! Bodies that are chunked, or that end with the connection: hyper reads them. The head of the answer was received
//! already, so hyper is given a transport that swallows its request and replays what came.

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

/// The body of a response to a request, frame by frame.
pub(crate) struct OddBody {
    driver: http1::Connection<TokioIo<Replay>, Empty<Bytes>>,
    /// Until the body has ended: without it hyper takes the connection for one that is not used any more.
    sender: Option<http1::SendRequest<Empty<Bytes>>>,
    body: Incoming,
    driven: bool,
    keep_alive: bool,
}

impl OddBody {
    /// The body of the response that `connection` has received the head of, to a `method` request.
    pub(super) async fn open(connection: Connection, method: &'static str) -> Result<Self, Failure> {
        let keep_alive = connection.keeps_alive();
        let (transport, received) = connection.into_parts();
        let replay = Replay { transport, received, replayed: 0, asked: false, reader: None };
        let (mut sender, mut driver) = http1::handshake(TokioIo::new(replay)).await.map_err(broken)?;
        let request =
            Request::builder().method(method).uri("/").body(Empty::<Bytes>::new()).expect("method and path are ours");
        let mut driven = false;
        let response = {
            let mut response = pin!(sender.send_request(request));
            poll_fn(|context| {
                drive(&mut driver, &mut driven, context)?;
                response.as_mut().poll(context).map_err(broken)
            })
            .await?
        };
        Ok(Self { driver, sender: Some(sender), body: response.into_body(), driven, keep_alive })
    }

    /// The next bytes; `None` where the body ends as its framing says that it does.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let frame = poll_fn(|context| {
                drive(&mut self.driver, &mut self.driven, context)?;
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
            drive(&mut self.driver, &mut self.driven, context)?;
            if self.driven { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await?;
        Ok(None)
    }

    /// The connection, once the body has ended.
    pub(super) fn into_connection(self) -> Connection {
        let parts = self.driver.into_parts();
        let Replay { transport, received, replayed, .. } = parts.io.into_inner();
        let rest = parts.read_buf.len() + received.len() - replayed;
        Connection::answered(transport, self.keep_alive && rest == 0)
    }
}

/// Moves bytes between the connection and the body.
fn drive(
    driver: &mut http1::Connection<TokioIo<Replay>, Empty<Bytes>>,
    driven: &mut bool,
    context: &mut Context<'_>,
) -> Result<(), Failure> {
    if !*driven && let Poll::Ready(ended) = driver.poll_without_shutdown(context) {
        *driven = true;
        ended.map_err(broken)?;
    }
    Ok(())
}

fn broken(error: hyper::Error) -> Failure {
    let kind = if error.is_incomplete_message() { ErrorKind::ShortBody } else { ErrorKind::Reset };
    Failure { kind, message: "the connection broke in the body", source: Some(io::Error::other(error)), hint: None }
}

struct Replay {
    transport: Transport,
    received: Vec<u8>,
    replayed: usize,
    /// Whether hyper has sent its request: to an answer that comes before, it would close the connection.
    asked: bool,
    reader: Option<Waker>,
}

impl AsyncRead for Replay {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.asked {
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
        self.asked = true;
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
