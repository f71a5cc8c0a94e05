//! Shards made block by block, in pieces of any size.

use std::io::Write;

use proptest::prelude::*;

use super::{Compression, Position, Reader, Sample, TarError, Walk};
use crate::buffer::{Buffer, Memory, PendingBuffer, SharedBuffer};

/// A header with a valid checksum.
pub(super) fn header(name: &[u8], kind: u8, size: u64) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
    match format!("{size:011o} ") {
        octal if octal.len() == 12 => block[124..136].copy_from_slice(octal.as_bytes()),
        _ => {
            block[124] = 0x80;
            block[128..136].copy_from_slice(&size.to_be_bytes());
        }
    }
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    sealed(block)
}

/// Sets the checksum of a header.
pub(super) fn sealed(mut block: Vec<u8>) -> Vec<u8> {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// A header and its body with padding.
pub(super) fn entry(name: &[u8], kind: u8, body: &[u8]) -> Vec<u8> {
    let mut entry = header(name, kind, body.len() as u64);
    entry.extend_from_slice(body);
    entry.resize(entry.len().next_multiple_of(512), 0);
    entry
}

/// A pax header of the next member.
pub(super) fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (keyword, value) in records {
        let rest = keyword.len() + value.len() + 3;
        let length = (1..).find(|length| rest + length.to_string().len() == *length).unwrap();
        body.extend_from_slice(format!("{length} {keyword}=").as_bytes());
        body.extend_from_slice(value);
        body.push(b'\n');
    }
    entry(b"pax", b'x', &body)
}

pub(super) fn shared(bytes: &[u8]) -> SharedBuffer {
    let (pending, mut dest) = PendingBuffer::new(Memory::allocate(bytes.len()).unwrap());
    dest.fill(bytes);
    drop(dest);
    pending.finish(bytes.len()).unwrap().into()
}

/// Begin, end, key, and extensions with their bytes.
pub(super) type Read = (u64, u64, String, Result<Vec<(String, Vec<u8>)>, TarError>);

fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

fn read(sample: Sample<Buffer>) -> Read {
    let Sample { begin, end, key, members } = sample;
    let members = members.map(|members| {
        members.into_iter().map(|member| (text(&member.extension), member.body.as_slice().to_vec())).collect()
    });
    (begin, end, text(&key), members)
}

/// Reads a shard in pieces that end at `cuts`.
pub(super) fn samples(
    shard: &[u8],
    cuts: &[usize],
    compression: Option<Compression>,
    position: u64,
) -> (Vec<Read>, Result<(), TarError>) {
    let mut reader = Reader::new(compression, position);
    let mut samples = Vec::new();
    let mut from = 0;
    let mut result = Ok(());
    for to in cuts.iter().copied().chain([shard.len()]) {
        result = result.and_then(|()| reader.push(&shared(&shard[from..to]), &mut samples));
        from = to;
    }
    let finished = reader.finish(&mut samples);
    assert!(result.is_ok() || finished == result, "the first error is returned again");
    (samples.into_iter().map(read).collect(), finished)
}

/// Samples before an error, the error, and the ranges that were read.
pub(super) type Walked = (Vec<Read>, Result<(), TarError>, Vec<(u64, u64)>);

/// Walks over the headers of a shard.
pub(super) fn walked(shard: &[u8]) -> Walked {
    let mut walk = Walk::new(shard.len() as u64);
    let mut found = Vec::new();
    let mut ranges = Vec::new();
    let result = loop {
        let fed = match walk.next_range() {
            Ok(None) => break Ok(()),
            Ok(Some(range)) => {
                ranges.push((range.start, range.end));
                walk.feed(&shard[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()])
            }
            Err(error) => Err(error),
        };
        if let Err(error) = fed {
            break Err(error);
        }
    };
    for Sample { begin, end, key, members } in walk.samples() {
        let bytes = |Position { offset, size }| {
            shard[usize::try_from(offset).unwrap()..usize::try_from(offset + size).unwrap()].to_vec()
        };
        let members = members.unwrap().into_iter().map(|member| (text(&member.extension), bytes(member.body)));
        found.push((begin, end, text(&key), Ok(members.collect())));
    }
    (found, result, ranges)
}

pub(super) fn good(begin: u64, end: u64, key: &str, members: &[(&str, &[u8])]) -> Read {
    let members = members.iter().map(|(extension, body)| ((*extension).to_owned(), body.to_vec())).collect();
    (begin, end, key.to_owned(), Ok(members))
}

fn error(shard: &[u8]) -> TarError {
    let (_, result) = samples(shard, &[], None, 0);
    let error = result.unwrap_err();
    assert_eq!(walked(shard).1.unwrap_err().offset, error.offset);
    error
}

const END: [u8; 1024] = [0; 1024];

#[test]
fn members_of_one_key_are_a_sample() {
    let shard = [
        entry(b"folder/", b'5', b""),
        entry(b"folder/a.JPG", b'0', &[7; 700]),
        entry(b"folder/link.jpg", b'2', b""),
        entry(b"readme", b'0', b"no extension"),
        entry(b"folder/a.cls", 0, b"3"),
        entry(b"__meta__/a.json", b'0', b"{}"),
        entry(b"folder/b.jpg", b'7', b""),
        END.to_vec(),
        b"ignored".to_vec(),
    ]
    .concat();
    let expected = [
        good(512, 4608, "folder/a", &[("jpg", &[7; 700]), ("cls", b"3")]),
        good(5632, 6144, "folder/b", &[("jpg", b"")]),
    ];
    assert_eq!(samples(&shard, &[], None, 0), (expected.to_vec(), Ok(())));
    assert_eq!(walked(&shard).0, expected);
    // From the end of the first sample on.
    assert_eq!(samples(&shard[4608..], &[], None, 4608), (expected[1..].to_vec(), Ok(())));
}

#[test]
fn long_names_come_from_extension_headers() {
    let long = [b"d/".as_slice(), &[b'n'; 300], b".txt"].concat();
    let key = text(&long[..302]);
    for extension in [entry(b"././@LongLink", b'L', &[&long[..], b"\0"].concat()), pax(&[("path", &long)])] {
        let shard = [extension.clone(), entry(b"short.bin", b'0', b"body")].concat();
        let (found, result) = samples(&shard, &[600], None, 0);
        assert_eq!(result, Ok(()));
        assert_eq!(found, [good(0, shard.len() as u64, &key, &[("txt", b"body")])]);
    }
}

#[test]
fn a_pax_size_replaces_that_of_the_header() {
    let mut body = header(b"a.bin", b'0', 0);
    body.extend_from_slice(&[1; 512]);
    let shard = [pax(&[("size", b"300")]), body, entry(b"b.bin", b'0', b"")].concat();
    let (found, result) = samples(&shard, &[], None, 0);
    assert_eq!((found.len(), result), (2, Ok(())));
    assert_eq!(found[0], good(0, 2048, "a", &[("bin", &[1; 300])]));
}

#[test]
fn an_extension_that_occurs_twice_is_an_error_of_one_sample() {
    let shard =
        [entry(b"a.x", b'0', b"1"), entry(b"a.X", b'0', b"2"), entry(b"b.x", b'0', b"3"), END.to_vec()].concat();
    let (found, result) = samples(&shard, &[], None, 0);
    assert_eq!(result, Ok(()));
    let reason = r#"sample "a" has several members with the extension "x""#;
    assert_eq!(found[0], (0, 2048, "a".to_owned(), Err(TarError::new(1024, reason))));
    assert_eq!(found[1], good(2048, 3072, "b", &[("x", b"3")]));
    assert_eq!(walked(&shard).1.unwrap_err().reason, reason);
}

#[test]
fn damaged_shards_are_errors_with_their_offset() {
    let first = entry(b"a.x", b'0', b"1");
    let mut damaged = [first.clone(), entry(b"b.x", b'0', b"2")].concat();
    damaged[1024 + 3] ^= 1;
    let found = error(&damaged);
    assert_eq!(found.offset, 1024);
    assert!(found.reason.starts_with("damaged header: the checksum is"), "{found}");

    assert!(error(b"").reason.contains("empty"));
    assert!(error(&[b'<'; 600]).reason.starts_with("not a tar"));
    assert!(error(&[gzip(b"a"), vec![0; 600]].concat()).reason.contains("compressed with gzip"));
    assert!(error(&first[..100]).reason.contains("after 100 bytes of a header"));
    assert!(samples(&first[..700], &[], None, 0).1.unwrap_err().reason.contains("padding are missing"));
    assert!(error(&entry(b"a.x", b'0', &[1; 600])[..700]).reason.contains("ends in the middle"));
    assert!(error(&[pax(&[("path", b"a")]), END.to_vec()].concat()).reason.contains("without its member"));
    assert!(error(&[pax(&[("size", b"-1")]), first.clone()].concat()).reason.contains("size to '-1'"));
    let global = [header(b"g", b'g', 9), [b"9 path=a\n".as_slice(), &[0; 503]].concat()].concat();
    assert!(error(&global).reason.contains("global pax header"));
}

#[test]
fn sparse_members_are_refused_by_name() {
    let found = error(&entry(b"holes.bin", b'S', b""));
    assert!(found.reason.contains(r#""holes.bin" is a sparse member"#), "{found}");
    let found = error(
        &[
            pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.name", b"holes.npy")]),
            entry(b"GNUSparseFile.0/holes.npy", b'0', b""),
        ]
        .concat(),
    );
    assert!(found.reason.contains(r#""holes.npy" is a sparse member"#), "{found}");
}

#[test]
fn lying_sizes_allocate_nothing() {
    for size in [&b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff"[..], b"\x80\0\0\0\x40\0\0\0\0\0\0\0", b"777777777777"] {
        let mut block = header(b"a.bin", b'0', 0);
        block[124..136].copy_from_slice(size);
        let shard = [sealed(block), vec![1; 100_000]].concat();
        let found = error(&shard);
        assert!(found.reason.contains("ends in the middle") || found.reason.contains("a size of"), "{found}");
    }
    for kind in [b'x', b'L', b'g', b'K'] {
        let found = error(&[header(b"big", kind, 1 << 40), vec![b'a'; 2 << 20]].concat());
        assert!(found.reason.contains("the limits are 64 and 1048576"), "{found}");
    }
    let found = error(&entry(b"", b'x', b"").repeat(65));
    assert!(found.reason.contains("65 extension headers"), "{found}");
}

#[test]
fn a_body_larger_than_its_first_memory_grows() {
    let shard = [entry(b"a.bin", b'0', &vec![5; 130 << 20]), END.to_vec()].concat();
    let cuts: Vec<usize> = (1..16).map(|cut| cut * (8 << 20)).collect();
    let (found, result) = samples(&shard, &cuts, None, 0);
    assert_eq!(result, Ok(()));
    assert_eq!(found[0].3.as_ref().unwrap()[0].1, vec![5; 130 << 20]);
}

#[test]
fn an_index_of_large_members_reads_few_bytes() {
    let size: usize = 1 << 30;
    let mut walk = Walk::new(size as u64);
    let body = header(b"a.bin", b'0', (4 << 20) - 512);
    let (mut total, mut count) = (0, 0);
    while let Some(range) = walk.next_range().unwrap() {
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
        // Every 4 MiB a header; each range starts with one.
        assert_eq!(range.start % (4 << 20), 0);
        let mut name = body.clone();
        name[..8].copy_from_slice(format!("{:06}.b", range.start >> 22).as_bytes());
        bytes[..512].copy_from_slice(&sealed(name));
        walk.feed(&bytes).unwrap();
        total += bytes.len();
        count += 1;
    }
    assert_eq!((walk.samples().count(), count), (256, 256));
    assert!(total * 100 <= 2 * size, "{total} of {size} bytes");
}

#[test]
fn an_index_of_small_members_takes_few_requests() {
    let members =
        (0..20_000).map(|index| entry(format!("{index}.x").as_bytes(), b'0', &[1; 4000])).collect::<Vec<_>>().concat();
    let (found, result, ranges) = walked(&members);
    assert_eq!((found.len(), result), (20_000, Ok(())));
    assert!(ranges.len() < 25, "{} requests for {} bytes", ranges.len(), members.len());
}

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(super) fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut compressed = vec![0; zstd_safe::compress_bound(bytes.len())];
    let length = zstd_safe::compress(&mut compressed[..], bytes, 1).unwrap();
    compressed.truncate(length);
    compressed
}

/// A shard with every kind of member, from the sizes of its bodies.
pub(super) fn shard(sizes: &[usize]) -> Vec<u8> {
    let mut shard = Vec::new();
    for (index, size) in sizes.iter().enumerate() {
        let body: Vec<u8> = (0..*size).map(|at| (at * 31 + index) as u8).collect();
        let name = format!("{}/{}.f{index}", index % 3, index / 2);
        match index % 7 {
            2 => shard.extend(pax(&[("path", format!("{}/{name}", "p".repeat(120)).as_bytes())])),
            3 => shard.extend(entry(b"././@LongLink", b'L', format!("{}/{name}\0", "l".repeat(150)).as_bytes())),
            4 => shard.extend(entry(b"link", b'2', b"")),
            5 => shard.extend(entry(b"noextension", b'0', &body)),
            _ => {}
        }
        shard.extend(entry(name.as_bytes(), b'0', &body));
    }
    shard.extend(END);
    shard
}

fn cuts(shard: &[u8], fractions: &[f64]) -> Vec<usize> {
    let mut cuts: Vec<usize> = fractions.iter().map(|fraction| (fraction * shard.len() as f64) as usize).collect();
    cuts.sort_unstable();
    cuts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn pieces_of_any_size_give_the_same_samples(
        sizes in prop::collection::vec(0_usize..3000, 1..20),
        fractions in prop::collection::vec(0.0..1.0, 0..12),
    ) {
        let shard = shard(&sizes);
        let whole = samples(&shard, &[], None, 0);
        prop_assert_eq!(&whole.1, &Ok(()));
        prop_assert_eq!(&samples(&shard, &cuts(&shard, &fractions), None, 0), &whole);
        prop_assert_eq!(&walked(&shard).0, &whole.0);
        for (bytes, compression) in [(gzip(&shard), Compression::Gzip), (zstd(&shard), Compression::Zstd)] {
            let read = samples(&bytes, &cuts(&bytes, &fractions), Some(compression), 0);
            prop_assert_eq!(&read, &whole);
        }
    }

    #[test]
    fn a_shard_that_is_cut_is_an_error_or_ends_between_members(
        sizes in prop::collection::vec(0_usize..3000, 1..10),
        at in 0.0..1.0,
    ) {
        let shard = shard(&sizes);
        let (whole, _) = samples(&shard, &[], None, 0);
        let cut = (at * shard.len() as f64) as usize;
        let (found, result) = samples(&shard[..cut], &[], None, 0);
        let same = found.iter().zip(&whole).take_while(|(one, other)| one == other).count();
        prop_assert!(same + 1 >= found.len());
        if !cut.is_multiple_of(512) {
            prop_assert!(cut > shard.len() - 1024 || result.is_err());
        }
        for (bytes, compression) in [(gzip(&shard), Compression::Gzip), (zstd(&shard), Compression::Zstd)] {
            let cut = (at * bytes.len() as f64) as usize;
            prop_assert!(samples(&bytes[..cut], &[], Some(compression), 0).1.is_err());
        }
    }

    #[test]
    fn a_reader_continues_at_any_sample(sizes in prop::collection::vec(0_usize..3000, 1..20)) {
        let shard = shard(&sizes);
        let (whole, _) = samples(&shard, &[], None, 0);
        for (index, (begin, end, ..)) in whole.iter().enumerate() {
            let rest = &shard[usize::try_from(*begin).unwrap()..];
            prop_assert_eq!(&samples(rest, &[], None, *begin).0, &whole[index..]);
            let rest = &shard[usize::try_from(*end).unwrap()..];
            prop_assert_eq!(&samples(rest, &[], None, *end).0, &whole[index + 1..]);
        }
    }

    #[test]
    fn any_bytes_give_samples_or_an_error(mut bytes in prop::collection::vec(any::<u8>(), 0..2000), seal in any::<bool>()) {
        if seal && bytes.len() >= 512 {
            let block = sealed(bytes[..512].to_vec());
            bytes[..512].copy_from_slice(&block);
        }
        let whole = samples(&bytes, &[], None, 0);
        prop_assert_eq!(samples(&bytes, &[bytes.len() / 3], None, 0), whole);
        let _ = walked(&bytes);
        for (magic, compression) in [(&b"\x1f\x8b\x08\0"[..], Compression::Gzip), (b"\x28\xb5\x2f\xfd", Compression::Zstd)] {
            let _ = samples(&bytes, &[], Some(compression), 0);
            let _ = samples(&[magic, &bytes].concat(), &[3], Some(compression), 0);
        }
    }
}
