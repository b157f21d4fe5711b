//! A tap: a network interface whose other end is a file of this process.
//!
//! Every read is one whole Ethernet frame that the node has sent, every write one that it receives.
//! A tap has no offloads unless somebody asks for them: frames are no longer than the interface's
//! MTU says, and their checksums are real.

use super::namespace::Namespace;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl;
use std::ffi::c_int;
use std::io;

/// One end of a node's link. The interface is gone when this is dropped.
#[derive(Debug)]
pub(super) struct Tap(OwnedFd);

impl Tap {
    /// Makes the interface `name` in `namespace`.
    pub(super) fn new(namespace: &Namespace, name: &str) -> io::Result<Self> {
        let mut request = InterfaceRequest {
            name: [0; NAME_LEN],
            flags: IFF_TAP | IFF_NO_PI,
            rest: [0; REQUEST_LEN - NAME_LEN - 2],
        };
        // The last byte stays 0, which ends the name.
        for (place, byte) in request.name[..NAME_LEN - 1].iter_mut().zip(name.bytes()) {
            *place = byte;
        }
        // The kernel makes the interface where the thread was that opened the device.
        namespace.within(move || {
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let device = rustix::fs::open(DEVICE, flags, Mode::empty())?;
            // SAFETY: TUNSETIFF takes the address of a `struct ifreq`, reads it and writes it back.
            // `InterfaceRequest` has that struct's length and its layout up to the flags, and
            // every byte of it may have any value.
            let attach = unsafe { ioctl::Updater::<TUNSETIFF, _>::new(&mut request) };
            // SAFETY: the opcode is TUNSETIFF with its own argument, on a descriptor that is ours.
            // It changes no memory but the request, which outlives the call.
            unsafe { ioctl::ioctl(&device, attach) }?;
            Ok(Self(device))
        })
    }

    /// A frame that the node has sent, if there is one.
    pub(super) fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let mut frame = Vec::with_capacity(LONGEST_FRAME);
        match rustix::io::read(&self.0, rustix::buffer::spare_capacity(&mut frame)) {
            Ok(_) => Ok(Some(frame)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Hands a frame to the node.
    pub(super) fn write(&self, frame: &[u8]) -> io::Result<()> {
        rustix::io::write(&self.0, frame)?;
        Ok(())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Where taps come from.
pub(super) const DEVICE: &str = "/dev/net/tun";

/// The kernel's `struct ifreq`, as far as it is used here.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; NAME_LEN],
    flags: i16,
    rest: [u8; REQUEST_LEN - NAME_LEN - 2],
}

const NAME_LEN: usize = 16;
const REQUEST_LEN: usize = 40;
/// From the kernel's `if_tun.h`. The number is made with the size of an `int`, though the argument
/// is a `struct ifreq`.
const TUNSETIFF: ioctl::Opcode = ioctl::opcode::write::<c_int>(b'T', 202);
const IFF_TAP: i16 = 0x0002;
const IFF_NO_PI: i16 = 0x1000;
/// An MTU of 1500 with an Ethernet header and a VLAN's tag, and some more.
const LONGEST_FRAME: usize = 2048;
