//! An HTTP server for unit tests, whose responses may be malformed. It does not implement S3.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use torchobj_core::runtime::Task;

/// Responds to requests by a function of their heads, and records the heads. Dropping it stops the server.
pub(crate) struct Fake {
    pub(crate) url: String,
    heads: Arc<Mutex<Vec<String>>>,
    _serving: Task<()>,
}

impl Fake {
    /// Starts a server that sends the responses of `respond`. If a response is empty, it sends nothing and keeps the
    /// connection open.
    pub(crate) async fn start(respond: impl FnMut(&str) -> String + Send + 'static) -> Self {
        Self::start_at("127.0.0.1:0", respond).await
    }

    /// Starts a server at `address`.
    pub(crate) async fn start_at(address: &str, respond: impl FnMut(&str) -> String + Send + 'static) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let heads = Arc::new(Mutex::new(Vec::new()));
        let (recorded, respond) = (heads.clone(), Arc::new(Mutex::new(respond)));
        let serving = Task::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let (recorded, respond) = (recorded.clone(), respond.clone());
                connections.spawn(async move {
                    let _ = serve(socket, |head| {
                        recorded.lock().unwrap().push(head.to_owned());
                        (respond.lock().unwrap())(head)
                    })
                    .await;
                });
            }
        });
        Self { url, heads, _serving: serving }
    }

    /// The heads of the received requests, oldest first.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }

    /// Number of received requests that begin with `method` and contain `text`.
    pub(crate) fn count(&self, method: &str, text: &str) -> usize {
        self.heads().iter().filter(|head| head.starts_with(method) && head.contains(text)).count()
    }
}

/// Formats a response.
pub(crate) fn http_response(status: u16, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status} Reason\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len())
}

async fn serve(mut socket: TcpStream, mut respond: impl FnMut(&str) -> String) -> std::io::Result<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await?);
        }
        let head = String::from_utf8(head).unwrap();
        let length = head
            .lines()
            .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
        socket.read_exact(&mut vec![0; length.unwrap_or(0)]).await?;
        let response = respond(&head);
        if response.is_empty() {
            std::future::pending::<()>().await;
        }
        socket.write_all(response.as_bytes()).await?;
        if response.starts_with("HTTP/1.0") || response.contains("Connection: close") {
            return socket.shutdown().await;
        }
    }
}
