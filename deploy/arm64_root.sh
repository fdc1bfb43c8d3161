#!/usr/bin/env bash
# Unpacks Debian's arm64 packages, with what they depend on, into a folder, without changing this system or needing
# root. apt must be configured for a Debian that has these packages.
# usage: arm64_root.sh FOLDER PACKAGE...
set -euo pipefail
command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || {
  echo "$(basename "$0") needs apt-get and dpkg-deb, which Debian has" >&2
  exit 1
}
mkdir -p "$1"
root=$(realpath "$1")
shift
state=$root/.apt
mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
: > "$state/status" # no package is installed
options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$state"
  -o Dir::State::status="$state/status" -o Dir::Cache="$state/cache" -o APT::Sandbox::User="$(id -un)")
apt-get "${options[@]}" update
apt-get "${options[@]}" --yes --no-install-recommends --download-only install "$@" > /dev/null
for package in "$state"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
rm -rf "$state"
