//! Bodies that are chunked, or that end with the connection: hyper reads them. The head of the answer was received
//! already, so hyper is given a transport that swallows its request and replays what came.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use torchobj_core::error::ErrorKind;

use super::{Connection, Failure, Transport};

/// Takes the body of the answer to a `method` request, and gives the connection back.
pub(super) async fn collect(
    connection: Connection,
    method: &'static str,
    limit: usize,
) -> Result<(Vec<u8>, Connection), Failure> {
    let keep_alive = connection.keeps_alive();
    let (transport, received) = connection.into_parts();
    let replay = Replay { transport, received, replayed: 0, asked: false, reader: None };
    let (mut sender, driver) = http1::handshake(TokioIo::new(replay)).await.map_err(broken)?;
    let request =
        Request::builder().method(method).uri("/").body(Empty::<Bytes>::new()).expect("method and path are ours");
    let body = async move {
        let answer = sender.send_request(request).await.map_err(broken)?;
        let body = Limited::new(answer.into_body(), limit).collect().await;
        let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
            Ok(error) => broken(*error),
            Err(_) => Failure::new(ErrorKind::Protocol, "the answer is too long"),
        })?;
        Ok(body.to_bytes().to_vec())
    };
    let (body, driver) = tokio::join!(body, driver.without_shutdown());
    let (text, parts) = (body?, driver.map_err(broken)?);
    let Replay { transport, received, replayed, .. } = parts.io.into_inner();
    let rest = parts.read_buf.len() + received.len() - replayed;
    Ok((text, Connection::answered(transport, keep_alive && rest == 0)))
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
