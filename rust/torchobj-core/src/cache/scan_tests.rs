//! What goes through all files of a cache: lists, counts and deletes its own, and no others.

use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::time::SystemTime;

use super::tests::{Bench, KIB, config, random_bytes};
use super::*;
use crate::test_folder::TestFolder;

#[tokio::test(flavor = "multi_thread")]
async fn files_that_were_read_at_the_same_time_are_evicted_by_name_until_the_others_fit() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(10 * KIB, 1);
    for number in 0..10 {
        let version = bench.put(&number.to_string(), &body).await;
        bench.whole(&number.to_string(), &body, &version).await;
    }
    let (files, now) = (bench.files(), SystemTime::now());
    for path in &files {
        fs::File::options().write(true).open(path).unwrap().set_modified(now).unwrap();
    }
    let size = 12 * KIB as u64;
    let entries = bench.folder().entries().unwrap();
    assert_eq!(entries.evict(10 * size).unwrap(), Evicted::default());
    assert_eq!(entries.evict(7 * size + 1).unwrap(), Evicted { files: 3, disk_bytes: 3 * size });
    assert_eq!(bench.files(), files[3..]);
    assert_eq!(entries.evict(0).unwrap().files, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_temporary_file_of_a_killed_process_is_deleted_and_its_bytes_are_subtracted() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(1000, 1);
    let version = bench.put("k", &body).await;
    bench.whole("k", &body, &version).await;
    let used = bench.folder().used_bytes().unwrap().unwrap();
    let left = bench.config.folder.join("v1/writing").join("0".repeat(32));
    fs::File::create(&left).unwrap().set_len(9000).unwrap();
    let reserve = |counts: &mut usage::Counts| Ok(counts.reserve(12 * KIB as u64, u64::MAX));
    assert!(bench.folder().usage.change(reserve).unwrap());
    bench.folder().correct(0, 3600).unwrap();
    assert!(!left.exists());
    assert_eq!(bench.folder().used_bytes().unwrap(), Some(used));
    // A count that is too high, too low, or lost, and a clock that was set back since the last scan.
    let damages: [fn(&mut usage::Counts); 4] = [
        |counts| counts.used += 50_000,
        |counts| counts.used = 0,
        |counts| counts.used = u64::MAX,
        |counts| (counts.used, counts.scanned_s) = (0, 1 << 50),
    ];
    for damage in damages {
        bench
            .folder()
            .usage
            .change(|counts| {
                counts.scanned_s = 0;
                damage(counts);
                Ok(())
            })
            .unwrap();
        bench.folder().correct(1 << 40, 3600).unwrap();
        assert_eq!(bench.folder().used_bytes().unwrap(), Some(used));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_are_listed_verified_and_removed() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(100 * KIB, 1);
    for key in ["a", "b"] {
        let version = bench.put(key, &body).await;
        bench.whole(key, &body, &version).await;
    }
    let files = bench.files();
    let file = fs::OpenOptions::new().write(true).open(&files[0]).unwrap();
    file.write_all_at(b"x", 70_000).unwrap();
    let mut entries = bench.folder().entries().unwrap();
    let (mut urls, mut intact) = (Vec::new(), Vec::new());
    while let Some(entry) = entries.next() {
        let entry = entry.unwrap();
        intact.push(entries.is_intact(&entry).unwrap());
        let (url, start, end, size) = entry.object.clone().unwrap();
        assert_eq!((start, end, size, entry.disk_bytes), (0, body.len() as u64, body.len() as u64, 104 * KIB as u64));
        urls.push(url);
        entries.remove(&entry).unwrap();
    }
    urls.sort();
    assert_eq!(
        (urls, intact),
        (vec!["memory://cached/a".to_owned(), "memory://cached/b".to_owned()], vec![Some(false), Some(true)])
    );
    assert_eq!(bench.folder().used_bytes().unwrap(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_that_are_deleted_meanwhile_are_not_damaged() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(1000, 1);
    let version = bench.put("k", &body).await;
    bench.whole("k", &body, &version).await;
    let mut entries = bench.folder().entries().unwrap();
    let entry = entries.next().unwrap().unwrap();
    fs::remove_file(&bench.files()[0]).unwrap();
    assert_eq!(entries.is_intact(&entry).unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_other_programs_are_neither_counted_nor_deleted() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let body = random_bytes(1000, 1);
    let version = bench.put("k", &body).await;
    bench.whole("k", &body, &version).await;
    let path = bench.config.folder.join("v1");
    let outside = folder.0.join("outside");
    let hexadecimal = "0123456789abcdef0123456789abcd";
    for name in ["00", "11"] {
        fs::create_dir_all(path.join(name)).unwrap();
    }
    fs::create_dir(&outside).unwrap();
    fs::remove_dir_all(path.join("22")).unwrap_or_default();
    symlink(&outside, path.join("22")).unwrap();
    symlink(outside.join(hexadecimal), path.join("00").join(hexadecimal)).unwrap();
    let (writing, temporary) = (path.join("writing"), "0123456789abcdef".repeat(2));
    fs::create_dir(writing.join(&temporary)).unwrap();
    symlink(&outside, writing.join(temporary.replace('0', "f"))).unwrap();
    let files = [
        path.join("notes"),
        path.join("00/notes"),
        outside.join(hexadecimal),
        path.join("11").join("A".repeat(30)),
        writing.join("notes"),
    ];
    files.iter().for_each(|file| fs::write(file, [7; 100_000]).unwrap());
    bench.folder().correct(1 << 40, 0).unwrap();
    assert_eq!(bench.folder().used_bytes().unwrap(), Some(4 * KIB as u64));
    assert_eq!(bench.folder().evict(0, i64::MAX, i64::MAX).unwrap().files, 1);
    assert_eq!(bench.folder().used_bytes().unwrap(), Some(0));
    let mut entries = bench.folder().entries().unwrap();
    assert!(entries.next().is_none());
    let mut others = entries.others().to_vec();
    others.sort();
    let mut expected = [
        files[0].clone(),
        files[1].clone(),
        files[3].clone(),
        files[4].clone(),
        path.join("22"),
        path.join("00").join(hexadecimal),
        writing.join(&temporary),
        writing.join(temporary.replace('0', "f")),
    ];
    expected.sort();
    assert_eq!(others, expected);
    assert!(files.iter().all(|file| fs::read(file).unwrap() == [7; 100_000]));
}

/// A file that is cut or grown may have been counted with either length.
#[tokio::test(flavor = "multi_thread")]
async fn the_count_is_not_too_low_after_files_of_another_length_are_deleted() {
    let folder = TestFolder::new();
    let bench = Bench::new(config(&folder)).counted();
    let mut objects = Vec::new();
    for key in ["a", "b", "c", "d"] {
        let body = random_bytes(100 * KIB, 1);
        let version = bench.put(key, &body).await;
        bench.whole(key, &body, &version).await;
        objects.push((key, body, version));
    }
    let files = bench.files();
    let set_length = |file: &Path, length| fs::OpenOptions::new().write(true).open(file).unwrap().set_len(length);
    set_length(&files[0], 5000).unwrap();
    fs::remove_file(bench.config.folder.join("v1/usage")).unwrap();
    bench.folder().correct(1 << 40, 3600).unwrap();
    for (key, body, version) in &objects {
        bench.whole(key, body, version).await;
    }
    let used = || bench.folder().used_bytes().unwrap().unwrap();
    assert_eq!(bench.values().cache_damaged, 1);
    assert!(used() >= bench.disk_usage());
    set_length(&files[1], 3 << 20).unwrap();
    let mut entries = bench.folder().entries().unwrap();
    let grown = entries.by_ref().map(Result::unwrap).find(|entry| entry.disk_bytes > 1 << 20).unwrap();
    entries.remove(&grown).unwrap();
    assert!(used() >= bench.disk_usage());
    bench.folder().correct(1 << 40, 3600).unwrap();
    assert_eq!(used(), bench.disk_usage());
}
