//! The HTTP client that the AWS SDK speaks through: hyper over our own connections, so that proxies, CA bundles and
//! the closing of sockets in a forked child hold for the SDK's requests too.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use aws_smithy_types::body::SdkBody;
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::Error as ClientError;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tower_service::Service;

use crate::http::{Dialer, Target, Transport};

/// Makes the SDK's connections.
#[derive(Debug, Clone)]
pub(super) struct Wire {
    client: Client<Dial, SdkBody>,
}

impl Wire {
    /// Over the connections of `dialer`; idle ones are kept for `keep_alive`.
    pub(super) fn new(dialer: Arc<Dialer>, keep_alive: Duration) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(keep_alive)
            .build(Dial(dialer));
        Self { client }
    }
}

impl HttpClient for Wire {
    fn http_connector(&self, _settings: &HttpConnectorSettings, _: &RuntimeComponents) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

impl HttpConnector for Wire {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let request = match request.try_into_http1x() {
            Ok(request) => request,
            Err(error) => return HttpConnectorFuture::ready(Err(ConnectorError::user(error.into()))),
        };
        let answer = self.client.request(request);
        HttpConnectorFuture::new(async move {
            match answer.await {
                Ok(answer) => HttpResponse::try_from(answer.map(SdkBody::from_body_1_x))
                    .map_err(|error| ConnectorError::other(error.into(), None)),
                Err(error) => Err(ConnectorError::io(error.into())),
            }
        })
    }
}

/// Why our dialer made no connection, if that is what an error of the SDK comes from.
pub(super) fn undialed(error: &(dyn std::error::Error + 'static)) -> Option<io::Error> {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.find(|cause| cause.downcast_ref().is_some_and(ClientError::is_connect))?;
    let refusal: &io::Error = causes.find_map(|cause| cause.downcast_ref())?;
    Some(io::Error::new(refusal.kind(), refusal.to_string()))
}

/// Connects by our dialer.
#[derive(Debug, Clone)]
struct Dial(Arc<Dialer>);

impl Service<Uri> for Dial {
    type Response = Dialed;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Dialed>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialer = self.0.clone();
        Box::pin(async move {
            let tls = uri.scheme_str() == Some("https");
            let host = uri.host().unwrap_or_default().to_owned();
            let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
            let target = Target { host, port, tls };
            let proxied = dialer.absolute_form(&target);
            Ok(Dialed { io: TokioIo::new(dialer.dial(&target).await?), proxied })
        })
    }
}

/// A connection of ours as hyper wants it.
struct Dialed {
    io: TokioIo<Transport>,
    proxied: bool,
}

impl Connection for Dialed {
    fn connected(&self) -> Connected {
        Connected::new().proxy(self.proxied)
    }
}

impl Read for Dialed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl Write for Dialed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
