//! The upper bound that `benchmarks/get.py` compares with: a minimal tokio loop. Signs with a cached key, parses heads with
//! httparse, and receives all bodies into one reused buffer, without retries, results or a pool.
//!
//! `limit HOST:PORT PATH_PREFIX COUNT REQUESTS CONNECTIONS THREADS` reads `PATH_PREFIX0` … repeatedly, and prints one line
//! of JSON: objects, bytes, wall seconds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};

use tokio::net::TcpStream;
use torchobj_store::s3::sign::{Canonical, Identity, Signer, Timestamp, UNSIGNED_PAYLOAD};

struct Job {
    address: String,
    prefix: String,
    count: usize,
    requests: usize,
    next: AtomicUsize,
    bytes: AtomicUsize,
    signer: Signer,
}

fn request_into(out: &mut Vec<u8>, job: &Job, index: usize) {
    let path = format!("{}{}", job.prefix, index % job.count);
    let time = Timestamp::new(SystemTime::now());
    let headers =
        [("host", job.address.as_str()), ("x-amz-content-sha256", UNSIGNED_PAYLOAD), ("x-amz-date", time.as_str())];
    out.clear();
    out.extend_from_slice(b"GET ");
    out.extend_from_slice(path.as_bytes());
    out.extend_from_slice(b" HTTP/1.1\r\n");
    for (name, value) in headers {
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"authorization: ");
    let canonical = Canonical { method: "GET", path: path.as_bytes(), query: b"", headers: &headers };
    job.signer.authorize_into(out, &time, &canonical);
    out.extend_from_slice(b"\r\n\r\n");
}

async fn read_some(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

async fn run_connection(job: Arc<Job>) -> io::Result<()> {
    let stream = TcpStream::connect(&job.address).await?;
    stream.set_nodelay(true)?;
    let (mut out, mut buffer) = (Vec::new(), vec![0; 1 << 20]);
    loop {
        let index = job.next.fetch_add(1, Ordering::Relaxed);
        if index >= job.requests {
            return Ok(());
        }
        request_into(&mut out, &job, index);
        let mut sent = 0;
        while sent < out.len() {
            match stream.try_write(&out[sent..]) {
                Ok(n) => sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
                Err(error) => return Err(error),
            }
        }
        let mut filled = 0;
        let (head, length) = loop {
            filled += read_some(&stream, &mut buffer[filled..]).await?;
            let mut headers = [httparse::EMPTY_HEADER; 64];
            let mut response = httparse::Response::new(&mut headers);
            let Ok(httparse::Status::Complete(head)) = response.parse(&buffer[..filled]) else { continue };
            if response.code != Some(200) {
                return Err(io::Error::other(format!("status {:?}", response.code)));
            }
            let length = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
            let length = length.and_then(|header| std::str::from_utf8(header.value).ok()?.parse::<usize>().ok());
            break (head, length.ok_or_else(|| io::Error::other("no content-length"))?);
        };
        let mut body = filled - head;
        while body < length {
            let max = buffer.len().min(length - body);
            body += read_some(&stream, &mut buffer[..max]).await?;
        }
        job.bytes.fetch_add(length, Ordering::Relaxed);
    }
}

#[expect(clippy::print_stdout, reason = "prints its result")]
fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, prefix, count, requests, connections, threads] = arguments.as_slice() else {
        return Err(io::Error::other("usage: limit HOST:PORT PATH_PREFIX COUNT REQUESTS CONNECTIONS THREADS"));
    };
    let number = |text: &String| text.parse::<usize>().map_err(io::Error::other);
    let identity = Identity { access_key: "bench".into(), secret_key: "bench".into(), session_token: None };
    let job = Arc::new(Job {
        address: address.clone(),
        prefix: prefix.clone(),
        count: number(count)?,
        requests: number(requests)?,
        next: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        signer: Signer::new(identity, "us-east-1", "s3"),
    });
    let connections = number(connections)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(number(threads)?).enable_all().build()?;
    let started = Instant::now();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..connections).map(|_| tokio::spawn(run_connection(job.clone()))).collect();
        for task in tasks {
            task.await.map_err(io::Error::other)??;
        }
        io::Result::Ok(())
    })?;
    println!(
        r#"{{"objects": {}, "bytes": {}, "wall_s": {:.6}}}"#,
        job.requests,
        job.bytes.load(Ordering::Relaxed),
        started.elapsed().as_secs_f64()
    );
    Ok(())
}
