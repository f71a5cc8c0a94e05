//! A server for unit tests: it says what it is told to, also what no server should. Knows nothing of S3.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use torchobj_core::runtime::Task;

/// Answers requests by a function of their heads, which it keeps. It ends with its handle.
pub(crate) struct Fake {
    pub(crate) url: String,
    heads: Arc<Mutex<Vec<String>>>,
    _serving: Task<()>,
}

impl Fake {
    /// A server whose answers are made by `answer`; to an empty one the connection is kept open in silence.
    pub(crate) async fn start(answer: impl FnMut(&str) -> String + Send + 'static) -> Self {
        Self::start_at("127.0.0.1:0", answer).await
    }

    /// The same, at an address.
    pub(crate) async fn start_at(address: &str, answer: impl FnMut(&str) -> String + Send + 'static) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let heads = Arc::new(Mutex::new(Vec::new()));
        let (kept, answer) = (heads.clone(), Arc::new(Mutex::new(answer)));
        let serving = Task::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let (kept, answer) = (kept.clone(), answer.clone());
                connections.spawn(async move {
                    let _ = serve(socket, |head| {
                        kept.lock().unwrap().push(head.to_owned());
                        (answer.lock().unwrap())(head)
                    })
                    .await;
                });
            }
        });
        Self { url, heads, _serving: serving }
    }

    /// The heads of the requests so far, oldest first.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }

    /// How many requests so far begin with `method` and contain `text`.
    pub(crate) fn count(&self, method: &str, text: &str) -> usize {
        self.heads().iter().filter(|head| head.starts_with(method) && head.contains(text)).count()
    }
}

/// An answer with a body.
pub(crate) fn answer(status: u16, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status} Said\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len())
}

async fn serve(mut socket: TcpStream, mut answer: impl FnMut(&str) -> String) -> std::io::Result<()> {
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
        let said = answer(&head);
        if said.is_empty() {
            std::future::pending::<()>().await;
        }
        socket.write_all(said.as_bytes()).await?;
        if said.starts_with("HTTP/1.0") || said.contains("Connection: close") {
            return socket.shutdown().await;
        }
    }
}
