//! Tests of malformed responses, and of responses that do not match the listing.

use std::sync::Arc;

use torchobj_core::client::Client;
use torchobj_core::error::{ErrorKind, Result};
use torchobj_core::list::Filter;
use torchobj_core::manifest::Manifest;
use torchobj_core::policy::{Policy, within};
use torchobj_core::read::{ClientRead, ReadRequest, try_get_many};
use torchobj_core::types::{ByteRange, Version};

use super::{Account, S3Store};
use crate::config::S3Config;
use crate::fake::{Fake, http_response};

const ETAG: &str = "ETag: \"0123\"\r\n";

fn client(fake: &Fake, bucket: &str, force_sdk: bool) -> Arc<Client> {
    let endpoint_url = Some(fake.url.clone());
    let config = S3Config { endpoint_url, anonymous: true, force_sdk, ..S3Config::default() };
    let policy = Policy { max_attempts: 2, ..Policy::default() };
    Arc::new(Client::new(Arc::new(S3Store::new(Arc::new(Account::new(config).unwrap()), bucket)), policy))
}

/// A server that lists one object with `size`, and sends `response` to its reads.
async fn listed_with(size: &'static str, response: impl Fn(&str) -> String + Send + 'static) -> Fake {
    Fake::start(move |head| match head.contains("list-type=2") {
        true => http_response(
            200,
            "",
            &format!(
                "<ListBucketResult><Contents><Key>k</Key>{size}<ETag>&quot;0123&quot;</ETag></Contents>\
                 </ListBucketResult>"
            ),
        ),
        false => response(head),
    })
    .await
}

/// Reads the listed object.
async fn read_listed(client: &Arc<Client>) -> Result<Vec<u8>> {
    let mut manifest = Manifest::default();
    client.list_into(&mut manifest, "s3://b", "", &Filter::default()).await.unwrap();
    let object = manifest.get(0).unwrap();
    let read = ReadRequest::listed(object, true);
    let fetched = try_get_many(vec![ClientRead::new(client.clone(), read)]).await?.remove(0);
    Ok(fetched.buffer.as_slice().to_vec())
}

/// A response whose body ends with the connection.
fn until_closed(headers: &str, body: &str) -> String {
    format!("HTTP/1.0 200 OK\r\n{headers}\r\n{body}")
}

fn chunked(headers: &str, body: &str) -> String {
    let chunk = if body.is_empty() { String::new() } else { format!("{:x}\r\n{body}\r\n", body.len()) };
    format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{headers}\r\n{chunk}0\r\n\r\n")
}

#[tokio::test]
async fn a_response_whose_length_differs_from_the_listed_size_is_an_error_with_both() {
    for length in [0, 100, 99_999] {
        for force_sdk in [false, true] {
            let fake = listed_with("<Size>10000</Size>", move |_| http_response(200, ETAG, &"x".repeat(length))).await;
            let error = read_listed(&client(&fake, "b", force_sdk)).await.unwrap_err();
            assert_eq!((error.kind(), error.attempts()), (ErrorKind::Protocol, 2), "{error}");
            let text = error.to_string();
            assert!(text.contains("10000 bytes") && text.contains(&format!("{length} bytes")), "{text}");
        }
    }
}

#[tokio::test]
async fn a_body_without_a_length_must_have_the_listed_size() {
    let body = "x".repeat(10_000);
    for make in [until_closed, chunked] {
        let right = body.clone();
        let fake = listed_with("<Size>10000</Size>", move |_| make(ETAG, &right)).await;
        assert_eq!(read_listed(&client(&fake, "b", false)).await.unwrap(), body.as_bytes());
        for length in [0, 1, 9_999, 10_001, 50_000] {
            let fake = listed_with("<Size>10000</Size>", move |_| make(ETAG, &"x".repeat(length))).await;
            let error = read_listed(&client(&fake, "b", false)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{length}: {error}");
            assert!(error.to_string().contains("10000 bytes"), "{error}");
        }
    }
}

#[tokio::test]
async fn bytes_of_an_incomplete_body_without_a_length_are_discarded() {
    let mut count = 0;
    let fake = Fake::start(move |_| {
        count += 1;
        match count {
            1 => chunked(ETAG, &"w".repeat(400)),
            _ => http_response(200, ETAG, &"x".repeat(1000)),
        }
    })
    .await;
    let fetched =
        client(&fake, "b", false).get(ReadRequest { size: Some(1000), ..ReadRequest::whole("k") }).await.unwrap();
    assert_eq!(fetched.buffer.as_slice(), "x".repeat(1000).as_bytes());
}

#[tokio::test]
async fn a_range_is_not_read_from_a_whole_body_without_a_length() {
    let gzip = format!("Content-Encoding: gzip\r\n{ETAG}");
    // Headers, whether the version is known, and the length of the body.
    let cases = [(gzip.as_str(), true, 5_000), (ETAG, false, 5_000), (ETAG, true, 999), (ETAG, true, 10_000)];
    for (make, (headers, known, length)) in
        [until_closed, chunked].into_iter().flat_map(|make| cases.map(|case| (make, case)))
    {
        let response = make(headers, &"z".repeat(length));
        let fake = Fake::start(move |_| response.clone()).await;
        let range = Some(ByteRange::Bounded(0..1000));
        let version = known.then(|| Version::new("\"0123\""));
        let read = ReadRequest { range, size: Some(10_000), version, ..ReadRequest::whole("k") };
        let error = client(&fake, "b", false).get(read).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{headers} {length}: {error}");
        assert!(error.to_string().contains("0..1000"), "{error}");
    }
}

#[tokio::test]
async fn a_chunked_range_is_read_if_the_response_has_its_range() {
    let response = chunked(&format!("{ETAG}Content-Range: bytes 0-999/10000\r\n"), &"x".repeat(1000));
    let response = response.replace("200 OK", "206 Partial Content");
    let fake = Fake::start(move |_| response.clone()).await;
    let read = ReadRequest { range: Some(ByteRange::Bounded(0..1000)), size: Some(10_000), ..ReadRequest::whole("k") };
    let fetched = client(&fake, "b", false).get(read).await.unwrap();
    assert_eq!(fetched.buffer.as_slice(), "x".repeat(1000).as_bytes());
}

#[tokio::test]
async fn the_size_of_a_body_without_a_length_is_requested_by_head_if_it_was_not_listed() {
    for (etag, right) in [("\"0123\"", true), ("\"4567\"", false)] {
        let fake = Fake::start(move |head| match head.starts_with("HEAD") {
            true => format!("HTTP/1.1 200 OK\r\nContent-Length: 10000\r\nETag: {etag}\r\n\r\n"),
            false => chunked(ETAG, &"x".repeat(10_000)),
        })
        .await;
        let fetched = client(&fake, "b", false).get(ReadRequest::whole("k")).await;
        assert_eq!(
            fetched.map(|fetched| fetched.buffer.len()).map_err(|error| error.kind()).ok(),
            right.then_some(10_000)
        );
    }
}

#[tokio::test]
async fn a_changed_object_of_another_size_is_reported_as_changed() {
    let fake = listed_with("<Size>10</Size>", |_| http_response(200, "ETag: \"4567\"\r\n", "other")).await;
    let error = read_listed(&client(&fake, "b", false)).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Changed, 1), "{error}");
}

#[tokio::test]
async fn an_error_document_with_an_etag_is_an_error() {
    let text = "<?xml version=\"1.0\"?><Error><Code>InternalError</Code><Message>try again</Message></Error>";
    let headers = format!("{ETAG}Content-Type: application/xml\r\n");
    let fake = listed_with("<Size>10000</Size>", move |_| http_response(200, &headers, text)).await;
    let error = read_listed(&client(&fake, "b", false)).await.unwrap_err();
    assert_eq!((error.kind(), error.code()), (ErrorKind::Server, Some("InternalError")), "{error}");
}

#[tokio::test]
async fn an_error_with_a_chunked_or_incomplete_body_has_the_details_of_its_headers() {
    let text = "<Error><Code>InternalError</Code></Error>";
    let head = "HTTP/1.1 500 Oops\r\nx-amz-request-id: R1\r\nTransfer-Encoding: chunked\r\n";
    let bodies = [format!("{:x}\r\n{text}\r\n0\r\n\r\n", text.len()), format!("{:x}\r\n{text}", 9 * text.len())];
    for body in bodies {
        let fake = Fake::start(move |_| format!("{head}Connection: close\r\n\r\n{body}")).await;
        let client = client(&fake, "b", false);
        for error in [
            client.get(ReadRequest::whole("k")).await.unwrap_err(),
            client.list_into(&mut Manifest::default(), "s3://b", "", &Filter::default()).await.unwrap_err(),
        ] {
            assert_eq!((error.kind(), error.request_id()), (ErrorKind::Server, Some("R1")), "{error}");
        }
    }
}

#[tokio::test]
async fn a_range_within_the_listed_size_that_is_refused_is_an_error() {
    let fake = listed_with("<Size>99999999</Size>", |_| http_response(416, "", "")).await;
    let error = read_listed(&client(&fake, "b", false)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("99999999 bytes"), "{error}");
}

#[tokio::test]
async fn an_object_is_empty_only_if_a_request_without_a_range_returns_no_bytes() {
    for force_sdk in [false, true] {
        let fake = Fake::start(|_| http_response(416, "", "")).await;
        let client = client(&fake, "b", force_sdk);
        for range in [None, Some(ByteRange::Suffix(4))] {
            let error = client.get(ReadRequest { range, ..ReadRequest::whole("k") }).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Range, "{error}");
        }
        let error = client.get_head_and_tail("k", 4, 4).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Range, "{error}");
    }
    let fake = Fake::start(|head| match head.contains("range: ") {
        true => http_response(416, "", ""),
        false => http_response(200, ETAG, ""),
    })
    .await;
    let client = client(&fake, "b", false);
    for range in [None, Some(ByteRange::Suffix(4))] {
        let fetched = client.get(ReadRequest { range, ..ReadRequest::whole("k") }).await.unwrap();
        assert_eq!((fetched.size, fetched.version), (0, Some(Version::new("\"0123\""))));
    }
}

#[tokio::test]
async fn an_object_whose_size_is_not_listed_is_read() {
    for size in ["", "<Size>many</Size>"] {
        let fake = listed_with(size, |_| http_response(200, ETAG, "four")).await;
        assert_eq!(read_listed(&client(&fake, "b", false)).await.unwrap(), b"four", "{size}");
        // The SDK refuses a page with a size that is not a number.
        if size.is_empty() {
            assert_eq!(read_listed(&client(&fake, "b", true)).await.unwrap(), b"four");
        }
    }
}

#[tokio::test]
async fn a_body_that_a_proxy_compressed_is_refused_and_one_that_was_stored_compressed_is_read() {
    let gzip = "Content-Encoding: gzip\r\n";
    let weak = "ETag: W/\"0123\"\r\n";
    // The response; whether it is accepted if the size of four bytes is listed; whether it is if no size is listed.
    let cases = [
        (http_response(200, &format!("{gzip}{ETAG}"), "four"), true, true),
        (http_response(200, &format!("{gzip}{ETAG}"), "other"), false, true),
        (http_response(200, &format!("{gzip}{weak}"), "four"), false, false),
        (http_response(200, gzip, "four"), false, false),
        (chunked(&format!("{gzip}{ETAG}"), "four"), true, false),
        (chunked(&format!("{gzip}{ETAG}"), "fou"), false, false),
        (chunked(&format!("{gzip}{weak}"), "four"), false, false),
        (http_response(200, &format!("Content-Encoding: identity\r\n{ETAG}"), "four"), true, true),
    ];
    for (response, listed, unlisted) in cases {
        let sent = response.clone();
        let fake = listed_with("<Size>4</Size>", move |_| sent.clone()).await;
        let client = client(&fake, "b", false);
        assert_eq!(read_listed(&client).await.is_ok(), listed, "{response}");
        assert_eq!(client.get(ReadRequest::whole("k")).await.is_ok(), unlisted, "{response}");
        assert!(fake.heads().iter().filter(|head| head.contains("/k ")).all(|head| {
            head.starts_with("HEAD") || head.to_ascii_lowercase().contains("accept-encoding: identity")
        }));
    }
}

#[tokio::test]
async fn a_repeated_upload_marker_is_an_error() {
    let upload = "<Upload><Key>k</Key><UploadId>u</UploadId></Upload>";
    for (upload, markers) in [(upload, 1), (upload, 3), ("", 1), ("", 1 << 40)] {
        let mut count: u64 = 0;
        let fake = Fake::start(move |_| {
            count += 1;
            let next = count % markers;
            http_response(
                200,
                "",
                &format!(
                    "<ListMultipartUploadsResult>{upload}<IsTruncated>true</IsTruncated><NextKeyMarker>k{next}\
                     </NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker></ListMultipartUploadsResult>"
                ),
            )
        })
        .await;
        let listed = within(std::time::Duration::from_secs(20), client(&fake, "b", false).uploads("")).await;
        let error = listed.expect("it ends").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(fake.heads().len() <= 250, "{}", fake.heads().len());
    }
}

#[tokio::test]
async fn listings_are_ordered_except_those_of_directory_buckets() {
    let fake = Fake::start(|_| String::new()).await;
    for (bucket, ordered) in [("b", true), ("b--use1-az5--x-s3", false), ("a--use1-az5--xa-s3", false)] {
        assert_eq!(client(&fake, bucket, false).store().capabilities().ordered_listing, ordered, "{bucket}");
    }
}

#[tokio::test]
async fn a_listing_whose_keys_cannot_be_decoded_is_an_error() {
    for key in ["caf&eacute;", "a%FFb", "a%2", ""] {
        let fake = Fake::start(move |head| {
            let (root, entry) = match head.contains("uploads") {
                true => ("ListMultipartUploadsResult", "<UploadId>1</UploadId>"),
                false => ("ListBucketResult", "<Size>1</Size>"),
            };
            let section = if head.contains("uploads") { "Upload" } else { "Contents" };
            let entries = format!("<{section}><Key>{key}</Key>{entry}</{section}>");
            http_response(200, "", &format!("<{root}><EncodingType>url</EncodingType>{entries}</{root}>"))
        })
        .await;
        for force_sdk in [false, true] {
            let client = client(&fake, "b", force_sdk);
            let mut manifest = Manifest::default();
            let error = client.list_into(&mut manifest, "s3://b", "", &Filter::default()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{key} {error}");
            let error = client.uploads("").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{key} {error}");
        }
    }
}

#[tokio::test]
async fn uploads_of_a_custom_endpoint_are_listed_without_a_prefix_and_filtered() {
    let fake = Fake::start(|head| {
        assert!(head.contains("uploads") && !head.contains("prefix=a"), "{head}");
        let upload = |key: &str, id: u32| format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId></Upload>");
        let uploads = upload("a/1", 1) + &upload("a/1", 2) + &upload("b/1", 3);
        http_response(200, "", &format!("<ListMultipartUploadsResult>{uploads}</ListMultipartUploadsResult>"))
    })
    .await;
    let uploads = client(&fake, "b", false).uploads("a/").await.unwrap();
    let found: Vec<_> = uploads.iter().map(|upload| (upload.key.as_str(), upload.id.as_str())).collect();
    assert_eq!(found, [("a/1", "1"), ("a/1", "2")]);
}

#[tokio::test]
async fn a_listing_of_uploads_that_repeats_one_or_has_no_end_is_an_error() {
    for upload in ["", "<Upload><Key>k</Key><UploadId>1</UploadId></Upload>"] {
        let mut number = 0;
        let fake = Fake::start(move |_| {
            number += 1;
            let more = format!("<IsTruncated>true</IsTruncated><NextKeyMarker>{number}</NextKeyMarker>{upload}");
            http_response(200, "", &format!("<ListMultipartUploadsResult>{more}</ListMultipartUploadsResult>"))
        })
        .await;
        let error = client(&fake, "b", false).uploads("k").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    }
}
